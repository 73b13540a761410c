// The holders whose blocks are all cut alike, 64 to a word: one walk along the prompt finds who holds which block in which
// group, a second one backwards finds the last boundary at which every group can resume.
//
// Why a walk and no jumps: a holder may have holes (a block evicted under its children), and then holding block n says
// nothing about the blocks before it. Reading on along a run costs a few nanoseconds a block (Nodes::find_after).
#include "match.hpp"

namespace blockcast {

namespace {

enum View { kAll, kGpu, kPinned, kViews };

// Who holds block n (counted from 1) in one group, by step.
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
    Planes(const Context& context, u32 length, const LayoutGroup& alike)
        : c_(context), length_(length), stride_(length / context.prefixes.unit()), words_((context.seats.count() + 63) / 64), pins_(!context.model.pins.empty()),
          layouts_(alike.layouts), pinning_(alike.pinning) {
        pinning_.resize(words_);
        for (auto& [layout, members] : layouts_) members.resize(words_);
        for (const auto& [layout, members] : layouts_) {
            for (const GroupDemand& demand : layout) planes_.resize(std::max<std::size_t>(planes_.size(), demand.ordinal + 1));
        }
        for (std::vector<u64>& found : found_) found.assign(words_ * 64, 0);
    }

    void run(const std::vector<const Holder*>& holders, std::vector<Match>& matches) {
        // Nearly every fleet: one layout, full attention alone. Then there is nothing to look back for.
        const Layout& first = layouts_.begin()->first;
        const bool plain = layouts_.size() == 1 && first.size() == 1 && first[0].role == Role::Full && !first[0].sparse;
        plain ? walk_plain(layouts_.begin()->second) : walk_layouts();
        matches.reserve(matches.size() + holders.size());
        for (const Holder* holder : holders) {
            const Seat seat = holder->seat;
            Match match{holder->id, found_[kAll][seat], found_[kGpu][seat], {}, 0};
            match.pinned_tokens = std::max(match.tokens, pins_ ? found_[kPinned][seat] : 0);
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

    // A bit of `reach` stands while the holder's blocks tile the prompt so far; where it falls, the prefix ends.
    u64 narrow(Words& reach, u64 held, std::size_t word, View view, u64 step) {
        if (const u64 lost = reach[word] & ~held) {
            each_bit(lost, word, [&](Seat seat) { found_[view][seat] = (step - 1) * length_; });
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
                u64 asked = 0;  // who could go on by a promise alone: nobody, along a prefix that is resident
                for (std::size_t word = 0; word < words_; ++word) asked |= pinned[word] & ~held[word] & pinning_[word];
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
            for (int view = 0; view < views; ++view) settle(layout, members, static_cast<View>(view), step);
        }
    }

    // Appends what everybody holds of block `step`.
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
        // What a prompt in flight leaves behind depends on the group's kind, and that on the layout.
        for (const auto& [layout, members] : layouts_) {
            for (const GroupDemand& demand : layout) {
                const bool lands = demand.role == Role::State;
                if (demand.sparse && !lands) continue;
                const u64* promised = lands ? &checkpoint_[at] : boundary_.data();
                u64* held = &planes_[demand.ordinal].held[kPinned][at];
                for (std::size_t word = 0; word < words_; ++word) held[word] |= promised[word] & members[word];
            }
        }
    }

    // The last boundary at which every group of the layout can resume, for each member.
    void settle(const Layout& layout, const Words& members, View view, u64 steps) {
        Words able((steps + 1) * words_);
        for (u64 step = 0; step <= steps; ++step) std::copy(members.begin(), members.end(), &able[step * words_]);
        for (const GroupDemand& demand : layout) {
            const Words& held = planes_[demand.ordinal].held[view];
            switch (demand.role) {
                case Role::Full: meet(able, since(held, steps, 0)); break;
                case Role::State: meet(able, held); break;
                case Role::Window: {
                    if (demand.blocks == 0) break;
                    Words whole = trailing(held, steps, demand.blocks);
                    if (view == kPinned && demand.sparse) join(whole, checkpoint_);
                    meet(able, whole);
                    break;
                }
                case Role::Chunk: {
                    Words whole = since(held, steps, demand.blocks);
                    if (view == kPinned && demand.sparse) join(whole, checkpoint_);
                    meet(able, whole);
                    break;
                }
                case Role::Ignored: break;
            }
        }
        for (std::size_t word = 0; word < words_; ++word) {
            u64 open = members[word];
            for (u64 step = steps; step > 0 && open != 0; --step) {
                const u64 hit = able[step * words_ + word] & open;
                each_bit(hit, word, [&](Seat seat) { found_[view][seat] = step * length_; });
                open &= ~hit;
            }
        }
    }

    static void meet(Words& into, const Words& from) {
        for (std::size_t i = 0; i < into.size(); ++i) into[i] &= from[i];
    }
    static void join(Words& into, const Words& from) {
        for (std::size_t i = 0; i < into.size(); ++i) into[i] |= from[i];
    }

    // By step: are all blocks since the last multiple of `chunk` blocks held (0: since the start)?
    Words since(const Words& held, u64 steps, u64 chunk) const {
        Words all(held.begin(), held.begin() + static_cast<long>((steps + 1) * words_));
        for (u64 step = 1; step <= steps; ++step) {
            for (std::size_t word = 0; word < words_; ++word) {
                u64& now = all[step * words_ + word];
                if (chunk != 0 && step % chunk == 0) {
                    now = ~u64{0};  // the next token opens a chunk: it looks at nothing before
                } else if (chunk == 0 || (step - 1) % chunk != 0) {
                    now &= all[(step - 1) * words_ + word];
                }
            }
        }
        return all;
    }

    // By step: are its last `count` blocks held, or all of them where there are fewer? What is known of the last `known`
    // blocks of two steps tells it of up to twice as many.
    Words trailing(const Words& held, u64 steps, u64 count) const {
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
    const u64 stride_;  // of its keys
    const std::size_t words_;
    const bool pins_;
    std::map<Layout, Words> layouts_;  // members by seat
    Words pinning_;                    // who has prompts in flight
    std::vector<Plane> planes_;        // by ordinal
    Words checkpoint_, boundary_;      // where prompts in flight will land (by step); what they leave of this step
    std::vector<u64> found_[kViews];   // by seat
};

}  // namespace

HolderPosition standing_of(const Holder& holder, bool pinned) {
    HolderPosition standing;
    standing.seat = holder.seat;
    standing.pinned = pinned;
    standing.other = pinned || holder.entries() != 0;
    u32 length = pinned ? holder.cut() : 0;
    bool full = holder.groups.empty();
    for (const Group& group : holder.groups) {
        for (const auto& [own, names] : group.lengths) {
            if (length != 0 && length != own) return standing;
            length = own;
        }
        full = full || (holder.demands(group) && group.role() == Role::Full);
    }
    if (!full || length == 0) return standing;
    for (const Group& group : holder.groups) {
        if (holder.demands(group) && group.role() == Role::Chunk && *group.window % length != 0) return standing;
    }
    standing.length = length;
    standing.other = false;
    add_layout(holder, length, standing.layout);
    return standing;
}

void match_planes(const Context& context, u32 length, const LayoutGroup& alike, std::vector<Match>& matches) {
    Planes(context, length, alike).run(alike.holders, matches);
}

}  // namespace blockcast
