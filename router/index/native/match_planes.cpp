// Match of the holders whose blocks have one length, 64 holders to a word. A walk along the prompt finds the holders of each
// block in each group; a second walk, backwards, finds the last boundary at which every group can resume.
//
// The walk visits each block, as a holder may have gaps (a block evicted under its children): holding block n does not imply
// the blocks before it. The next block of a run costs a few nanoseconds (Nodes::find_after).
#include "match.hpp"

namespace blockcast {

namespace {

enum View { kAll, kGpu, kPinned, kViews };

// Seats of the holders of block n (counted from 1) in one group, `words_` words for each n.
struct Plane {
    Words held[kViews];
};

void add_layout(const Holder& holder, u64 length, Layout& layout) {
    for (u32 i = 0; i < holder.groups.size(); ++i) {
        const Group& group = holder.groups[i];
        if (!holder.demands(group)) continue;
        const u64 window = group.window.value_or(0);
        // The next token looks back window - 1 tokens; in a chunk, to the chunk's start.
        const u64 blocks = group.role() == Role::Window  ? (window - 1 + length - 1) / length
                           : group.role() == Role::Chunk ? window / length
                                                         : 0;
        layout.push_back(GroupDemand{i, group.role(), blocks, group.sparse});
    }
    if (holder.groups.empty()) layout.push_back(GroupDemand{0, Role::Full, 0, false});
}

class Planes {
public:
    Planes(const Context& context, u32 length, const UniformHolders& uniform)
        : c_(context), length_(length), stride_(length / context.prefixes.unit()),
          words_((context.seats.count() + 63) / 64), pins_(!context.model.pins.empty()),
          layouts_(uniform.layouts) {
        for (auto& [layout, members] : layouts_) members.resize(words_);
        for (const auto& [layout, members] : layouts_) {
            for (const GroupDemand& demand : layout) planes_.resize(std::max<std::size_t>(planes_.size(), demand.ordinal + 1));
        }
        for (std::vector<u64>& found : usable_) found.assign(words_ * 64, 0);
    }

    void run(const std::vector<const Holder*>& holders, std::vector<Match>& matches) {
        // Most fleets have one layout of full attention alone, which needs no second walk: 134 blocks on 8 workers take 4 us
        // instead of 17, and 1,024 blocks on 64 workers with pins 26 to 48 instead of 130 to 160.
        const Layout& first = layouts_.begin()->first;
        const bool plain = layouts_.size() == 1 && first.size() == 1 && first[0].role == Role::Full && !first[0].sparse;
        plain ? walk_plain(layouts_.begin()->second) : walk_layouts();
        matches.reserve(matches.size() + holders.size());
        for (const Holder* holder : holders) {
            const Seat seat = holder->seat;
            Match match{holder->id, usable_[kAll][seat], usable_[kGpu][seat], {}, 0};
            match.pinned_tokens = std::max(match.tokens, pins_ ? usable_[kPinned][seat] : 0);
            if (match.tokens == 0 && match.pinned_tokens == 0) continue;
            count_tiers(*holder, match);
            matches.push_back(match);
        }
    }

private:
    [[gnu::always_inline]] u32 next_node(u32 before, u64 step) const {
        return c_.nodes.find_after(before, key(step), static_cast<u32>(length_));
    }

    u64 key(u64 step) const { return c_.prefixes.numbered(step * stride_); }

    // Add the seats with a boundary or a checkpoint of a prompt in flight at this step to these words.
    void add_pinned(u64 step, u64* boundaries, u64* checkpoints) const {
        c_.pinned_blocks.each(key(step), [&](u32 kind, u32 word, u64 bits) {
            (kind == PinnedBlocks::kBoundary ? boundaries : checkpoints)[word] |= bits;
        });
    }

    // -- full attention alone --------------------------------------------------------------------------------------------

    // Clear the bits in `reach` of holders without this block, and record the end of their prefix. A bit is set while the
    // holder has all blocks so far.
    u64 narrow(Words& reach, u64 held, std::size_t word, View view, u64 step) {
        if (const u64 lost = reach[word] & ~held) {
            each_bit(lost, word, [&](Seat seat) { usable_[view][seat] = (step - 1) * length_; });
            reach[word] &= held;
        }
        return reach[word];
    }

    void walk_plain(const Words& members) {
        const u32 first_slot = layouts_.begin()->first[0].ordinal * kTiers;
        Words reach = members, gpu = members, pinned = members, held(words_), held_gpu(words_), held_pinned(words_), unused(words_);
        const u64 steps = c_.limit / length_;
        u64 step = 1, more = 1;
        for (u32 id = 0; step <= steps && more != 0; ++step) {
            id = next_node(id, step);
            for (std::size_t word = 0; word < words_; ++word) held[word] = held_gpu[word] = 0;
            if (id != 0) {
                c_.nodes[id].presence.each([&](u32 slot, u32 word, u64 bits) {
                    if (slot - first_slot >= kTiers || word >= words_) return;
                    held[word] |= bits;
                    if (slot == first_slot) held_gpu[word] |= bits;
                });
            }
            if (pins_) {
                held_pinned = held;
                u64 asked = 0;  // holders that need a pin to continue; none along a resident prefix
                for (std::size_t word = 0; word < words_; ++word) asked |= pinned[word] & ~held[word];
                if (asked != 0) add_pinned(step, held_pinned.data(), unused.data());
            }
            more = 0;
            for (std::size_t word = 0; word < words_; ++word) {
                more |= narrow(reach, held[word], word, kAll, step);
                narrow(gpu, held_gpu[word], word, kGpu, step);
                if (pins_) more |= narrow(pinned, held_pinned[word], word, kPinned, step);
            }
        }
        for (std::size_t word = 0; word < words_ && more != 0; ++word) {
            narrow(reach, 0, word, kAll, step);
            narrow(gpu, 0, word, kGpu, step);
            narrow(pinned, 0, word, kPinned, step);
        }
    }

    // -- any layout ------------------------------------------------------------------------------------------------------

    void walk_layouts() {
        const u64 steps = c_.limit / length_;
        const int views = pins_ ? kViews : kPinned;
        for (Plane& plane : planes_) {
            for (int view = 0; view < views; ++view) plane.held[view].assign(words_, ~u64{0});  // the empty prefix
        }
        checkpoint_.assign(words_, 0);
        std::map<const Layout*, Words> reach;
        for (const auto& [layout, members] : layouts_) reach[&layout] = members;
        u64 step = 0, more = 1;
        for (u32 id = 0; step < steps && more != 0;) {
            id = next_node(id, ++step);
            read_step(id, step, views);
            more = 0;
            for (auto& [layout, words] : reach) {
                for (const GroupDemand& demand : *layout) {
                    if (demand.role != Role::Full) continue;
                    const u64* held = &planes_[demand.ordinal].held[pins_ ? kPinned : kAll][step * words_];
                    for (std::size_t word = 0; word < words_; ++word) words[word] &= held[word];
                }
                for (u64 word : words) more |= word;
            }
        }
        for (const auto& [layout, members] : layouts_) {
            for (int view = 0; view < views; ++view) set_last_boundaries(layout, members, static_cast<View>(view), step);
        }
    }

    // Append the holders of block `step` to all planes.
    void read_step(u32 id, u64 step, int views) {
        const std::size_t at = step * words_;
        for (Plane& plane : planes_) {
            for (int view = 0; view < views; ++view) plane.held[view].resize(at + words_, 0);
        }
        if (id != 0) {
            c_.nodes[id].presence.each([&](u32 slot, u32 word, u64 bits) {
                if (slot / kTiers >= planes_.size() || word >= words_) return;
                Plane& plane = planes_[slot / kTiers];
                plane.held[kAll][at + word] |= bits;
                if (slot % kTiers == 0) plane.held[kGpu][at + word] |= bits;
            });
        }
        if (!pins_) return;
        checkpoint_.resize(at + words_, 0);
        boundary_.assign(words_, 0);
        add_pinned(step, boundary_.data(), &checkpoint_[at]);
        for (Plane& plane : planes_) {
            for (std::size_t word = 0; word < words_; ++word) plane.held[kPinned][at + word] = plane.held[kAll][at + word];
        }
        // Pinned blocks count by the kind of the group, which depends on the layout.
        for (const auto& [layout, members] : layouts_) {
            for (const GroupDemand& demand : layout) {
                const bool is_state = demand.role == Role::State;
                if (demand.sparse && !is_state) continue;
                const u64* promised = is_state ? &checkpoint_[at] : boundary_.data();
                u64* held = &planes_[demand.ordinal].held[kPinned][at];
                for (std::size_t word = 0; word < words_; ++word) held[word] |= promised[word] & members[word];
            }
        }
    }

    // Set the last boundary at which every group of the layout can resume, for each member.
    void set_last_boundaries(const Layout& layout, const Words& members, View view, u64 steps) {
        Words resumable((steps + 1) * words_);
        for (u64 step = 0; step <= steps; ++step) std::copy(members.begin(), members.end(), &resumable[step * words_]);
        for (const GroupDemand& demand : layout) {
            const Words& held = planes_[demand.ordinal].held[view];
            switch (demand.role) {
                case Role::Full: intersect(resumable, held_since(held, steps, 0)); break;
                case Role::State: intersect(resumable, held); break;
                case Role::Window: {
                    if (demand.blocks == 0) break;
                    Words held_window = held_trailing(held, steps, demand.blocks);
                    if (view == kPinned && demand.sparse) unite(held_window, checkpoint_);
                    intersect(resumable, held_window);
                    break;
                }
                case Role::Chunk: {
                    Words held_window = held_since(held, steps, demand.blocks);
                    if (view == kPinned && demand.sparse) unite(held_window, checkpoint_);
                    intersect(resumable, held_window);
                    break;
                }
                case Role::Ignored: break;
            }
        }
        for (std::size_t word = 0; word < words_; ++word) {
            u64 open = members[word];
            for (u64 step = steps; step > 0 && open != 0; --step) {
                const u64 hit = resumable[step * words_ + word] & open;
                each_bit(hit, word, [&](Seat seat) { usable_[view][seat] = step * length_; });
                open &= ~hit;
            }
        }
    }

    static void intersect(Words& into, const Words& from) {
        for (std::size_t i = 0; i < into.size(); ++i) into[i] &= from[i];
    }
    static void unite(Words& into, const Words& from) {
        for (std::size_t i = 0; i < into.size(); ++i) into[i] |= from[i];
    }

    // Return for each step the seats that hold all blocks since the last multiple of `chunk` blocks (0: since the start).
    Words held_since(const Words& held, u64 steps, u64 chunk) const {
        Words all(held.begin(), held.begin() + static_cast<long>((steps + 1) * words_));
        for (u64 step = 1; step <= steps; ++step) {
            for (std::size_t word = 0; word < words_; ++word) {
                u64& now = all[step * words_ + word];
                if (chunk != 0 && step % chunk == 0) {
                    now = ~u64{0};  // the next token begins a chunk and attends to no block before it
                } else if (chunk == 0 || (step - 1) % chunk != 0) {
                    now &= all[(step - 1) * words_ + word];
                }
            }
        }
        return all;
    }

    // Return for each step the seats that hold its last `count` blocks, or all if there are fewer. The results for `known`
    // blocks at two steps combine to those for up to twice as many.
    Words held_trailing(const Words& held, u64 steps, u64 count) const {
        Words all(held.begin(), held.begin() + static_cast<long>((steps + 1) * words_));
        for (u64 known = 1; known < count && known <= steps; known *= 2) {
            const std::size_t back = std::min(known, count - known) * words_;
            for (std::size_t at = all.size(); at-- > back;) all[at] &= all[at - back];
        }
        return all;
    }

    void count_tiers(const Holder& holder, Match& match) const {
        if (match.gpu_tokens == match.tokens) {
            match.tier_tokens[0] = match.tokens;
            return;
        }
        const auto full = std::find_if(holder.groups.begin(), holder.groups.end(), [&](const Group& group) {
            return holder.demands(group) && group.role() == Role::Full;
        });
        const u32 ordinal = static_cast<u32>(full - holder.groups.begin());
        u32 id = 0;
        for (u64 step = 1; step <= match.tokens / length_; ++step) {
            id = next_node(id, step);
            match.tier_tokens[fastest_tier(c_.nodes, id, holder.seat, ordinal)] += length_;
        }
    }

    const Context& c_;
    const u64 length_;
    const u64 stride_;  // distance of its keys, in the keys of the prompt
    const std::size_t words_;
    const bool pins_;
    std::map<Layout, Words> layouts_;  // members by seat
    std::vector<Plane> planes_;        // by ordinal
    Words checkpoint_, boundary_;      // checkpoints of prompts in flight by step; their boundaries at this step
    std::vector<u64> usable_[kViews];   // by seat
};

}  // namespace

MatchPlan make_match_plan(const Holder& holder, bool pinned) {
    MatchPlan plan;
    plan.seat = holder.seat;
    plan.is_mixed = pinned || holder.entries() != 0;
    u32 length = pinned ? holder.pin_length() : 0;
    bool full = holder.groups.empty();
    for (const Group& group : holder.groups) {
        for (const auto& [group_length, names] : group.lengths) {
            if (length != 0 && length != group_length) return plan;
            length = group_length;
        }
        full = full || (holder.demands(group) && group.role() == Role::Full);
    }
    if (!full || length == 0) return plan;
    for (const Group& group : holder.groups) {
        if (holder.demands(group) && group.role() == Role::Chunk && *group.window % length != 0) return plan;
    }
    plan.length = length;
    plan.is_mixed = false;
    add_layout(holder, length, plan.layout);
    return plan;
}

void match_planes(const Context& context, u32 length, const UniformHolders& uniform, std::vector<Match>& matches) {
    Planes(context, length, uniform).run(uniform.holders, matches);
}

}  // namespace blockcast
