#include "match.hpp"

#include <algorithm>
#include <numeric>

namespace blockcast {

namespace {

constexpr u32 kUnknown = ~u32{0};
constexpr u32 kAllTiers = (1u << kTiers) - 1, kGpuOnly = 1;

using Words = std::vector<u64>;

template <class Visit>
void each_bit(u64 bits, std::size_t word, Visit visit) {
    for (; bits != 0; bits &= bits - 1) visit(static_cast<Seat>(word * 64 + static_cast<u32>(__builtin_ctzll(bits))));
}

// Digests at multiples of `unit`, computed as far as somebody asks.
class Prefixes {
public:
    Prefixes(const Query& query, const Digester& digester, u64 unit) : query_(query), digester_(digester), unit_(unit) {
        keys_.reserve(query.count / unit + 1);
        keys_.push_back(query.start);
    }

    u64 at(u64 position) {
        const std::size_t index = position / unit_;
        while (keys_.size() <= index) {
            const u64 from = (keys_.size() - 1) * unit_;
            keys_.push_back(digester_.extend(keys_.back(), query_.tokens + from, unit_, from, query_.media,
                                             query_.media_count));
        }
        return keys_[index];
    }

private:
    const Query& query_;
    const Digester& digester_;
    const u64 unit_;
    std::vector<u64> keys_;
};

class Walk {
public:
    Walk(const Query& query, const ModelHolders& model, const Digester& digester, const Nodes& nodes, const Seats& seats,
         const Promises& boundaries, const Promises& checkpoints)
        : model_(model), nodes_(nodes), seats_(seats), boundaries_(boundaries), checkpoints_(checkpoints),
          limit_(query.count - 1), lengths_(lengths_in_use(model)), unit_(unit_of(lengths_)),
          prefixes_(query, digester, unit_) {}

    std::vector<Match> run() {
        std::vector<Match> matches;
        if (lengths_.empty()) return matches;
        std::vector<const Holder*> simple;
        const std::size_t words = (seats_.count() + 63) / 64;
        if (lengths_.size() == 1) {
            live_.assign(words, 0);
            for (const Holder* holder : model_.holders) {
                if (is_simple(*holder)) live_[holder->seat / 64] |= u64{1} << (holder->seat % 64);
            }
            tokens_.assign(words * 64, 0);
            gpu_.assign(words * 64, 0);
            pinned_.assign(words * 64, 0);
            walk_simple(words);
        }
        for (const Holder* holder : model_.holders) {
            Match match{};
            if (lengths_.size() == 1 && is_simple(*holder)) {
                match = simple_match(*holder);
            } else {
                match = general_match(*holder);
            }
            if (match.tokens != 0 || match.pinned_tokens != 0) matches.push_back(match);
        }
        return matches;
    }

private:
    static std::vector<u32> lengths_in_use(const ModelHolders& model) {
        std::vector<u32> lengths;
        for (const auto& [length, users] : model.lengths) lengths.push_back(length);
        for (const auto& [holder, pins] : model.pins) lengths.push_back(holder->cut());
        std::sort(lengths.begin(), lengths.end());
        lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
        return lengths;
    }

    static u64 unit_of(const std::vector<u32>& lengths) {
        u64 unit = 0;
        for (u32 length : lengths) unit = std::gcd(unit, u64{length});
        return std::max<u64>(unit, 1);
    }

    // -- holders with full attention alone, all cut alike: 64 of them in one word ----------------------------------------

    bool is_simple(const Holder& holder) const {
        if (holder.groups.empty()) return true;
        for (std::size_t i = 0; i < holder.groups.size(); ++i) {
            if (holder.demands(holder.groups[i]) != (i == 0)) return false;
        }
        return holder.groups[0].role() == Role::Full;
    }

    // A bit of `reach` stands while the holder's blocks tile the prompt so far; where it falls, the prefix ends.
    static u64 narrow(u64& reach, u64 held, std::size_t word, std::vector<u64>& tokens, u64 position) {
        if (const u64 lost = reach & ~held) {
            each_bit(lost, word, [&](Seat seat) { tokens[seat] = position; });
            reach &= held;
        }
        return reach;
    }

    void walk_simple(std::size_t words) {
        const u64 length = lengths_[0], steps = limit_ / length;
        const bool pins = !model_.pins.empty();
        Words reach = live_, gpu = live_, pinned = live_, held(words), held_gpu(words), held_pinned(words);
        u32 id = 0;
        u64 step = 1;
        for (; step <= steps; ++step) {
            const u64 key = prefixes_.at(step * length), before = (step - 1) * length;
            id = nodes_.find_after(id, key, static_cast<u32>(length));
            path_.push_back(id);
            for (std::size_t word = 0; word < words; ++word) held[word] = held_gpu[word] = 0;
            if (id != 0) {
                nodes_[id].presence.each([&](u32 slot, u32 word, u64 bits) {
                    if (slot >= kTiers || word >= words) return;
                    held[word] |= bits;
                    if (slot == 0) held_gpu[word] |= bits;
                });
            }
            u64 more = 0;
            for (std::size_t word = 0; word < words; ++word) {
                more |= narrow(reach[word], held[word], word, tokens_, before);
                narrow(gpu[word], held_gpu[word], word, gpu_, before);
            }
            if (pins) {
                held_pinned = held;
                boundaries_.each(key, [&](const Holder* holder) {
                    held_pinned[holder->seat / 64] |= u64{1} << (holder->seat % 64);
                });
                for (std::size_t word = 0; word < words; ++word) {
                    more |= narrow(pinned[word], held_pinned[word], word, pinned_, before);
                }
            }
            if (more == 0) return;
        }
        for (std::size_t word = 0; word < words; ++word) {
            narrow(reach[word], 0, word, tokens_, (step - 1) * length);
            narrow(gpu[word], 0, word, gpu_, (step - 1) * length);
            narrow(pinned[word], 0, word, pinned_, (step - 1) * length);
        }
    }

    Match simple_match(const Holder& holder) const {
        Match match{holder.id, tokens_[holder.seat], gpu_[holder.seat], {}, 0};
        match.pinned_tokens = std::max(match.tokens, model_.pins.empty() ? 0 : pinned_[holder.seat]);
        match.tier_tokens[0] = match.gpu_tokens;
        if (match.gpu_tokens == match.tokens) return match;
        match.tier_tokens[0] = 0;
        for (u64 step = 0; step < match.tokens / lengths_[0]; ++step) {
            match.tier_tokens[fastest_tier(path_[step], holder.seat, 0)] += lengths_[0];
        }
        return match;
    }

    u32 fastest_tier(u32 id, Seat seat, u32 ordinal) const {
        for (u32 tier = 0; tier + 1 < kTiers; ++tier) {
            if (nodes_[id].presence.test(seat, ordinal * kTiers + tier)) return tier;
        }
        return kTiers - 1;
    }

    // -- any holder: groups of every kind, blocks of any lengths ----------------------------------------------------------

    struct View {
        u32 tiers;
        bool pins;  // count what is promised as resident
    };

    u32 node(u64 position, u32 length) {
        if (memo_.empty()) memo_.assign((limit_ / unit_ + 1) * lengths_.size(), kUnknown);
        const std::size_t which = static_cast<std::size_t>(
            std::lower_bound(lengths_.begin(), lengths_.end(), length) - lengths_.begin());
        u32& id = memo_[position / unit_ * lengths_.size() + which];
        if (id == kUnknown) {
            const u32 before = position > length ? memo_[(position - length) / unit_ * lengths_.size() + which] : 0;
            id = nodes_.find_after(before == kUnknown ? 0 : before, prefixes_.at(position), length);
        }
        return id;
    }

    bool has(const Holder& holder, u32 ordinal, const View& view, u64 position, u32 length) {
        if (const u32 id = node(position, length)) {
            for (u32 tier = 0; tier < kTiers; ++tier) {
                if ((view.tiers >> tier & 1) && nodes_[id].presence.test(holder.seat, ordinal * kTiers + tier)) return true;
            }
        }
        if (!view.pins) return false;
        const Group* group = ordinal < holder.groups.size() ? &holder.groups[ordinal] : nullptr;
        if (group != nullptr && group->role() == Role::State) return checkpoints_.has(prefixes_.at(position), &holder);
        return !(group != nullptr && group->sparse) && boundaries_.has(prefixes_.at(position), &holder);
    }

    Match general_match(const Holder& holder) {
        Match match{holder.id, 0, 0, {}, 0};
        std::vector<u32> demanding;
        for (u32 i = 0; i < holder.groups.size(); ++i) {
            if (holder.demands(holder.groups[i])) demanding.push_back(i);
        }
        if (holder.entries() != 0) match.tokens = usable(holder, demanding, {kAllTiers, false}, limit_, 0);
        match.pinned_tokens = match.tokens;
        if (model_.pins.count(&holder) != 0) {
            if (demanding.empty()) demanding.push_back(static_cast<u32>(holder.groups.size()));
            const u64 pinned = usable(holder, demanding, {kAllTiers, true}, limit_, holder.cut());
            match.pinned_tokens = std::max(match.tokens, pinned);
        }
        if (match.tokens == 0) return match;
        match.gpu_tokens = usable(holder, demanding, {kGpuOnly, false}, match.tokens, 0);
        count_tiers(holder, demanding, match);
        return match;
    }

    Role role(const Holder& holder, u32 ordinal) const {
        return ordinal < holder.groups.size() ? holder.groups[ordinal].role() : Role::Full;
    }

    std::vector<u32> lengths(const Holder& holder, u32 ordinal, u32 cut) const {
        std::vector<u32> own;
        if (ordinal < holder.groups.size()) {
            for (const auto& [length, names] : holder.groups[ordinal].lengths) own.push_back(length);
        }
        if (cut != 0 && std::find(own.begin(), own.end(), cut) == own.end()) own.push_back(cut);
        std::sort(own.begin(), own.end());
        return own;
    }

    // Largest p <= limit at which every group can resume; `cut` is a block length to try besides those a group holds.
    u64 usable(const Holder& holder, const std::vector<u32>& demanding, const View& view, u64 limit, u32 cut) {
        std::vector<std::vector<u32>> own;
        std::vector<bool> candidates;
        bool any_full = false;
        for (u32 ordinal : demanding) {
            own.push_back(lengths(holder, ordinal, cut));
            if (role(holder, ordinal) != Role::Full) continue;
            const std::vector<bool> reached = tiled(holder, ordinal, view, limit, own.back());
            if (any_full) {
                for (std::size_t i = 0; i < candidates.size(); ++i) candidates[i] = candidates[i] && reached[i];
            } else {
                candidates = reached;
            }
            any_full = true;
        }
        for (u64 index = limit / unit_; index > 0; --index) {
            const u64 p = index * unit_;
            if (any_full && !candidates[index]) continue;
            bool boundary = any_full, resumes = true;
            for (std::size_t i = 0; i < demanding.size() && !boundary; ++i) {
                boundary = holds_any(holder, demanding[i], view, p, own[i]);
            }
            for (std::size_t i = 0; i < demanding.size() && boundary && resumes; ++i) {
                resumes = resumes_at(holder, demanding[i], view, p, own[i]);
            }
            if (boundary && resumes) return p;
        }
        return 0;
    }

    // By index of position: do blocks of the group tile [0, position)?
    std::vector<bool> tiled(const Holder& holder, u32 ordinal, const View& view, u64 limit, const std::vector<u32>& own) {
        std::vector<bool> reached(limit / unit_ + 1, false);
        reached[0] = true;
        u64 last = 0;
        for (u64 index = 0; index <= last / unit_; ++index) {
            if (!reached[index]) continue;
            for (u32 length : own) {
                const u64 end = index * unit_ + length;
                if (end > limit || reached[end / unit_] || !has(holder, ordinal, view, end, length)) continue;
                reached[end / unit_] = true;
                last = std::max(last, end);
            }
        }
        return reached;
    }

    bool holds_any(const Holder& holder, u32 ordinal, const View& view, u64 p, const std::vector<u32>& own) {
        return std::any_of(own.begin(), own.end(),
                           [&](u32 length) { return length <= p && has(holder, ordinal, view, p, length); });
    }

    bool resumes_at(const Holder& holder, u32 ordinal, const View& view, u64 p, const std::vector<u32>& own) {
        const Role what = role(holder, ordinal);
        if (what == Role::Full) return true;
        if (what == Role::State) return holds_any(holder, ordinal, view, p, own);
        const Group& group = holder.groups[ordinal];
        if (view.pins && group.sparse && checkpoints_.has(prefixes_.at(p), &holder)) return true;
        const u64 window = *group.window;
        // The next token looks back window - 1 tokens; in a chunk, to the chunk's start.
        const u64 first = what == Role::Chunk ? p - p % window : p > window - 1 ? p - (window - 1) : 0;
        std::vector<u64> frontier{p};
        std::vector<bool> seen;
        if (own.size() > 1) seen.assign(p / unit_ + 1, false);
        while (!frontier.empty()) {
            const u64 end = frontier.back();
            frontier.pop_back();
            if (end <= first) return true;
            for (u32 length : own) {
                if (length > end || !has(holder, ordinal, view, end, length)) continue;
                const u64 start = end - length;
                if (!seen.empty()) {
                    if (seen[start / unit_]) continue;
                    seen[start / unit_] = true;
                }
                frontier.push_back(start);
            }
        }
        return false;
    }

    // Tokens of [0, tokens) by the fastest tier of the first full-attention group; the path is walked back, shortest
    // block first.
    void count_tiers(const Holder& holder, const std::vector<u32>& demanding, Match& match) {
        const auto full = std::find_if(demanding.begin(), demanding.end(),
                                       [&](u32 ordinal) { return role(holder, ordinal) == Role::Full; });
        if (full == demanding.end() || match.gpu_tokens == match.tokens) {
            match.tier_tokens[0] = match.gpu_tokens;
            match.tier_tokens[1] = match.tokens - match.gpu_tokens;
            return;
        }
        const std::vector<u32> own = lengths(holder, *full, 0);
        const View view{kAllTiers, false};
        const std::vector<bool> reached = tiled(holder, *full, view, match.tokens, own);
        for (u64 end = match.tokens; end > 0;) {
            for (u32 length : own) {
                if (length > end || !reached[(end - length) / unit_] || !has(holder, *full, view, end, length)) continue;
                match.tier_tokens[fastest_tier(node(end, length), holder.seat, *full)] += length;
                end -= length;
                break;
            }
        }
    }

    const ModelHolders& model_;
    const Nodes& nodes_;
    const Seats& seats_;
    const Promises &boundaries_, &checkpoints_;
    const u64 limit_;  // the last token of a prompt is always computed
    const std::vector<u32> lengths_;
    const u64 unit_;
    Prefixes prefixes_;
    Words live_;
    std::vector<u64> tokens_, gpu_, pinned_;  // by seat
    std::vector<u32> path_;                   // node of each step
    std::vector<u32> memo_;
};

}  // namespace

std::vector<Match> match_all(const Query& query, const ModelHolders& model, const Digester& digester, const Nodes& nodes,
                             const Seats& seats, const Promises& boundaries, const Promises& checkpoints) {
    if (query.count < 2) return {};
    return Walk(query, model, digester, nodes, seats, boundaries, checkpoints).run();
}

}  // namespace blockcast
