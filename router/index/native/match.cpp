// Who is matched how: by bit planes (match_planes.cpp) where all blocks are cut alike, else one by one.
//
// What the planes cannot do is a chain of blocks of several lengths back through a window: how far it reaches is a number
// for each holder, and no bit.
#include "match.hpp"

namespace blockcast {

namespace {

constexpr u32 kUnknown = ~u32{0};
constexpr u32 kAllTiers = (1u << kTiers) - 1, kGpuOnly = 1;

Role role(const Holder& holder, u32 ordinal) {
    return ordinal < holder.groups.size() ? holder.groups[ordinal].role() : Role::Full;
}

std::vector<u32> lengths_of(const Holder& holder, u32 ordinal, u32 cut) {
    std::vector<u32> own;
    if (ordinal < holder.groups.size()) {
        for (const auto& [length, names] : holder.groups[ordinal].lengths) own.push_back(length);
    }
    if (cut != 0 && std::find(own.begin(), own.end(), cut) == own.end()) own.push_back(cut);
    std::sort(own.begin(), own.end());
    return own;
}

std::vector<u32> lengths_in_use(const ModelHolders& model) {
    std::vector<u32> lengths;
    for (const auto& [length, alike] : model.alike) lengths.push_back(length);
    for (const Holder* holder : model.others) {
        for (const Group& group : holder->groups) {
            for (const auto& [length, names] : group.lengths) lengths.push_back(length);
        }
        if (model.pins.count(holder) != 0) lengths.push_back(holder->cut());
    }
    std::sort(lengths.begin(), lengths.end());
    lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
    return lengths;
}

// Any holder, whatever its groups and block lengths.
class AnyMatcher {
public:
    explicit AnyMatcher(const Context& context) : c_(context) {}
    Match match(const Holder& holder);

private:
    struct View {
        u32 tiers;
        bool pins;  // count what is promised as resident
    };

    u32 node(u64 position, u32 length);
    bool has(const Holder& holder, u32 ordinal, const View& view, u64 position, u32 length);
    u64 usable(const Holder& holder, const std::vector<u32>& demanding, const View& view, u64 limit, u32 cut);
    std::vector<bool> tiled(const Holder& holder, u32 ordinal, const View& view, u64 limit, const std::vector<u32>& own);
    bool holds_any(const Holder& holder, u32 ordinal, const View& view, u64 p, const std::vector<u32>& own);
    bool resumes_at(const Holder& holder, u32 ordinal, const View& view, u64 p, const std::vector<u32>& own);
    void count_tiers(const Holder& holder, const std::vector<u32>& demanding, Match& match);

    const Context& c_;
    std::vector<u32> memo_;  // node by position and length, as far as somebody asked
};

u32 AnyMatcher::node(u64 position, u32 length) {
    if (memo_.empty()) memo_.assign((c_.limit / c_.unit + 1) * c_.lengths.size(), kUnknown);
    const std::size_t which = static_cast<std::size_t>(
        std::lower_bound(c_.lengths.begin(), c_.lengths.end(), length) - c_.lengths.begin());
    u32& id = memo_[position / c_.unit * c_.lengths.size() + which];
    if (id == kUnknown) {
        const u32 before = position > length ? memo_[(position - length) / c_.unit * c_.lengths.size() + which] : 0;
        id = c_.nodes.find_after(before == kUnknown ? 0 : before, c_.prefixes.at(position), length);
    }
    return id;
}

bool AnyMatcher::has(const Holder& holder, u32 ordinal, const View& view, u64 position, u32 length) {
    if (const u32 id = node(position, length)) {
        for (u32 tier = 0; tier < kTiers; ++tier) {
            if ((view.tiers >> tier & 1) && c_.nodes[id].presence.test(holder.seat, ordinal * kTiers + tier)) return true;
        }
    }
    if (!view.pins) return false;
    const Group* group = ordinal < holder.groups.size() ? &holder.groups[ordinal] : nullptr;
    const bool is_state = group != nullptr && group->role() == Role::State;
    if (group != nullptr && group->sparse && !is_state) return false;
    return c_.pinned_blocks.has(c_.prefixes.at(position), holder.seat, is_state ? PinnedBlocks::kCheckpoint : PinnedBlocks::kBoundary);
}

Match AnyMatcher::match(const Holder& holder) {
    Match match{holder.id, 0, 0, {}, 0};
    std::vector<u32> demanding;
    for (u32 i = 0; i < holder.groups.size(); ++i) {
        if (holder.demands(holder.groups[i])) demanding.push_back(i);
    }
    if (holder.entries() != 0) match.tokens = usable(holder, demanding, {kAllTiers, false}, c_.limit, 0);
    match.pinned_tokens = match.tokens;
    if (c_.model.pins.count(&holder) != 0) {
        if (demanding.empty()) demanding.push_back(static_cast<u32>(holder.groups.size()));
        const u64 pinned = usable(holder, demanding, {kAllTiers, true}, c_.limit, holder.cut());
        match.pinned_tokens = std::max(match.tokens, pinned);
    }
    if (match.tokens == 0) return match;
    match.gpu_tokens = usable(holder, demanding, {kGpuOnly, false}, match.tokens, 0);
    count_tiers(holder, demanding, match);
    return match;
}

// Largest p <= limit at which every group can resume; `cut` is a block length to try besides those a group holds.
u64 AnyMatcher::usable(const Holder& holder, const std::vector<u32>& demanding, const View& view, u64 limit, u32 cut) {
    std::vector<std::vector<u32>> own;
    std::vector<bool> candidates;
    bool any_full = false;
    for (u32 ordinal : demanding) {
        own.push_back(lengths_of(holder, ordinal, cut));
        if (role(holder, ordinal) != Role::Full) continue;
        const std::vector<bool> reached = tiled(holder, ordinal, view, limit, own.back());
        if (any_full) {
            for (std::size_t i = 0; i < candidates.size(); ++i) candidates[i] = candidates[i] && reached[i];
        } else {
            candidates = reached;
        }
        any_full = true;
    }
    for (u64 index = limit / c_.unit; index > 0; --index) {
        const u64 p = index * c_.unit;
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
std::vector<bool> AnyMatcher::tiled(const Holder& holder, u32 ordinal, const View& view, u64 limit,
                                    const std::vector<u32>& own) {
    std::vector<bool> reached(limit / c_.unit + 1, false);
    reached[0] = true;
    u64 last = 0;
    for (u64 index = 0; index <= last / c_.unit; ++index) {
        if (!reached[index]) continue;
        for (u32 length : own) {
            const u64 end = index * c_.unit + length;
            if (end > limit || reached[end / c_.unit] || !has(holder, ordinal, view, end, length)) continue;
            reached[end / c_.unit] = true;
            last = std::max(last, end);
        }
    }
    return reached;
}

bool AnyMatcher::holds_any(const Holder& holder, u32 ordinal, const View& view, u64 p, const std::vector<u32>& own) {
    return std::any_of(own.begin(), own.end(),
                       [&](u32 length) { return length <= p && has(holder, ordinal, view, p, length); });
}

bool AnyMatcher::resumes_at(const Holder& holder, u32 ordinal, const View& view, u64 p, const std::vector<u32>& own) {
    const Role what = role(holder, ordinal);
    if (what == Role::Full) return true;
    if (what == Role::State) return holds_any(holder, ordinal, view, p, own);
    const Group& group = holder.groups[ordinal];
    if (view.pins && group.sparse && c_.pinned_blocks.has(c_.prefixes.at(p), holder.seat, PinnedBlocks::kCheckpoint)) return true;
    const u64 window = *group.window;
    // The next token looks back window - 1 tokens; in a chunk, to the chunk's start.
    const u64 first = what == Role::Chunk ? p - p % window : p > window - 1 ? p - (window - 1) : 0;
    std::vector<u64> frontier{p};
    std::vector<bool> seen;
    if (own.size() > 1) seen.assign(p / c_.unit + 1, false);
    while (!frontier.empty()) {
        const u64 end = frontier.back();
        frontier.pop_back();
        if (end <= first) return true;
        for (u32 length : own) {
            if (length > end || !has(holder, ordinal, view, end, length)) continue;
            const u64 start = end - length;
            if (!seen.empty()) {
                if (seen[start / c_.unit]) continue;
                seen[start / c_.unit] = true;
            }
            frontier.push_back(start);
        }
    }
    return false;
}

// Tokens of [0, tokens) by the fastest tier of the first full-attention group; the path is walked back, shortest
// block first.
void AnyMatcher::count_tiers(const Holder& holder, const std::vector<u32>& demanding, Match& match) {
    const auto full = std::find_if(demanding.begin(), demanding.end(),
                                   [&](u32 ordinal) { return role(holder, ordinal) == Role::Full; });
    if (full == demanding.end() || match.gpu_tokens == match.tokens) {
        match.tier_tokens[0] = match.gpu_tokens;
        match.tier_tokens[1] = match.tokens - match.gpu_tokens;
        return;
    }
    const std::vector<u32> own = lengths_of(holder, *full, 0);
    const View view{kAllTiers, false};
    const std::vector<bool> reached = tiled(holder, *full, view, match.tokens, own);
    for (u64 end = match.tokens; end > 0;) {
        for (u32 length : own) {
            if (length > end || !reached[(end - length) / c_.unit] || !has(holder, *full, view, end, length)) continue;
            match.tier_tokens[fastest_tier(c_.nodes, node(end, length), holder.seat, *full)] += length;
            end -= length;
            break;
        }
    }
}

}  // namespace

void ModelHolders::place(const Holder* holder) {
    HolderPosition& known = standings_[holder];
    HolderPosition now = standing_of(*holder, pins.count(holder) != 0);
    if (now == known) return;
    stand(holder, known, false);
    stand(holder, now, true);
    known = std::move(now);
}

void ModelHolders::remove(const Holder* holder) {
    stand(holder, standings_[holder], false);
    standings_.erase(holder);
}

void ModelHolders::stand(const Holder* holder, const HolderPosition& standing, bool on) {
    const auto list = [&](std::vector<const Holder*>& among) {
        const auto at = std::lower_bound(among.begin(), among.end(), holder,
                                         [](const Holder* a, const Holder* b) { return a->id < b->id; });
        on ? among.insert(at, holder) : among.erase(at);
    };
    const auto mark = [&](Words& words) {
        const std::size_t word = standing.seat / 64;
        const u64 bit = u64{1} << (standing.seat % 64);
        if (words.size() <= word) words.resize(word + 1);
        words[word] = on ? words[word] | bit : words[word] & ~bit;
    };
    if (standing.other) list(others);
    if (standing.length == 0) return;
    LayoutGroup& among = alike[standing.length];
    list(among.holders);
    if (among.holders.empty()) {
        alike.erase(standing.length);
        return;
    }
    if (standing.pinned) mark(among.pinning);
    Words& members = among.layouts[standing.layout];
    mark(members);
    if (std::all_of(members.begin(), members.end(), [](u64 word) { return word == 0; })) {
        among.layouts.erase(standing.layout);
    }
}

std::vector<Match> match_all(const Query& query, const ModelHolders& model, const Digester& digester, const Nodes& nodes,
                             const Seats& seats, const PinnedBlocks& pinned_blocks) {
    const std::vector<u32> lengths = lengths_in_use(model);
    if (query.count < 2 || lengths.empty()) return {};
    u64 unit = 0;
    for (u32 length : lengths) unit = std::gcd(unit, u64{length});
    Prefixes prefixes(query, digester, unit);
    const Context context{query, model, nodes, seats, pinned_blocks, lengths, unit, query.count - 1, prefixes};
    std::vector<Match> matches;
    for (const auto& [length, alike] : model.alike) {
        match_planes(context, length, alike, matches);
    }
    AnyMatcher any(context);
    for (const Holder* holder : model.others) {
        const Match match = any.match(*holder);
        if (match.tokens != 0 || match.pinned_tokens != 0) matches.push_back(match);
    }
    if (model.alike.size() + model.others.size() > 1) {
        std::sort(matches.begin(), matches.end(), [](const Match& a, const Match& b) { return a.holder < b.holder; });
    }
    return matches;
}

}  // namespace blockcast
