// Holders whose blocks all have one length are matched together by bit planes (match_planes.cpp), the others one by one
// here: a chain of blocks of several lengths back through a window needs a number for each holder, not a bit.
#include "match.hpp"

namespace blockcast {

namespace {

constexpr u32 kUnknown = ~u32{0};
constexpr u32 kAllTiers = (1u << kTiers) - 1, kGpuOnly = 1;

Role role(const Holder& holder, u32 ordinal) {
    return ordinal < holder.groups.size() ? holder.groups[ordinal].role() : Role::Full;
}

std::vector<u32> lengths_of(const Holder& holder, u32 ordinal, u32 pin_length) {
    std::vector<u32> group_lengths;
    if (ordinal < holder.groups.size()) {
        for (const auto& [length, names] : holder.groups[ordinal].lengths) group_lengths.push_back(length);
    }
    const auto at = std::lower_bound(group_lengths.begin(), group_lengths.end(), pin_length);
    if (pin_length != 0 && (at == group_lengths.end() || *at != pin_length)) group_lengths.insert(at, pin_length);
    return group_lengths;
}

std::vector<u32> lengths_in_use(const ModelHolders& model) {
    std::vector<u32> lengths;
    for (const auto& [length, holders] : model.uniform) lengths.push_back(length);
    for (const Holder* holder : model.mixed) {
        for (const Group& group : holder->groups) {
            for (const auto& [length, names] : group.lengths) lengths.push_back(length);
        }
        if (model.pins.count(holder) != 0) lengths.push_back(holder->pin_length());
    }
    std::sort(lengths.begin(), lengths.end());
    lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
    return lengths;
}

// Match of one holder with any groups and block lengths.
class MixedMatcher {
public:
    explicit MixedMatcher(const Context& context) : c_(context) {}
    Match match(const Holder& holder);

private:
    struct View {
        u32 tiers;
        bool pins;  // count pinned blocks as resident
    };

    u32 node(u64 position, u32 length);
    bool has(const Holder& holder, u32 ordinal, const View& view, u64 position, u32 length);
    u64 usable(const Holder& holder, const std::vector<u32>& demanding, const View& view, u64 limit, u32 pin_length);
    std::vector<bool> tiled(const Holder& holder, u32 ordinal, const View& view, u64 limit, const std::vector<u32>& group_lengths);
    bool holds_any(const Holder& holder, u32 ordinal, const View& view, u64 p, const std::vector<u32>& group_lengths);
    bool resumes_at(const Holder& holder, u32 ordinal, const View& view, u64 p, const std::vector<u32>& group_lengths);
    void count_tiers(const Holder& holder, const std::vector<u32>& demanding, Match& match);

    const Context& c_;
    std::vector<u32> memo_;  // nodes found so far, by position and length
};

u32 MixedMatcher::node(u64 position, u32 length) {
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

bool MixedMatcher::has(const Holder& holder, u32 ordinal, const View& view, u64 position, u32 length) {
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

Match MixedMatcher::match(const Holder& holder) {
    Match match{holder.id, 0, 0, {}, 0};
    std::vector<u32> demanding;
    for (u32 i = 0; i < holder.groups.size(); ++i) {
        if (holder.demands(holder.groups[i])) demanding.push_back(i);
    }
    if (holder.entries() != 0) match.tokens = usable(holder, demanding, {kAllTiers, false}, c_.limit, 0);
    match.pinned_tokens = match.tokens;
    if (c_.model.pins.count(&holder) != 0) {
        if (demanding.empty()) demanding.push_back(static_cast<u32>(holder.groups.size()));
        const u64 pinned = usable(holder, demanding, {kAllTiers, true}, c_.limit, holder.pin_length());
        match.pinned_tokens = std::max(match.tokens, pinned);
    }
    if (match.tokens == 0) return match;
    match.gpu_tokens = usable(holder, demanding, {kGpuOnly, false}, match.tokens, 0);
    count_tiers(holder, demanding, match);
    return match;
}

// Return the largest p <= limit at which every group can resume. `pin_length`: a block length to try besides those of a group.
u64 MixedMatcher::usable(const Holder& holder, const std::vector<u32>& demanding, const View& view, u64 limit, u32 pin_length) {
    std::vector<std::vector<u32>> group_lengths;
    std::vector<bool> candidates;
    bool any_full = false;
    for (u32 ordinal : demanding) {
        group_lengths.push_back(lengths_of(holder, ordinal, pin_length));
        if (role(holder, ordinal) != Role::Full) continue;
        const std::vector<bool> reached = tiled(holder, ordinal, view, limit, group_lengths.back());
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
            boundary = holds_any(holder, demanding[i], view, p, group_lengths[i]);
        }
        for (std::size_t i = 0; i < demanding.size() && boundary && resumes; ++i) {
            resumes = resumes_at(holder, demanding[i], view, p, group_lengths[i]);
        }
        if (boundary && resumes) return p;
    }
    return 0;
}

// Return for each position, in units, whether blocks of the group cover [0, position) without a gap.
std::vector<bool> MixedMatcher::tiled(const Holder& holder, u32 ordinal, const View& view, u64 limit,
                                    const std::vector<u32>& group_lengths) {
    std::vector<bool> reached(limit / c_.unit + 1, false);
    reached[0] = true;
    u64 last = 0;
    for (u64 index = 0; index <= last / c_.unit; ++index) {
        if (!reached[index]) continue;
        for (u32 length : group_lengths) {
            const u64 end = index * c_.unit + length;
            if (end > limit || reached[end / c_.unit] || !has(holder, ordinal, view, end, length)) continue;
            reached[end / c_.unit] = true;
            last = std::max(last, end);
        }
    }
    return reached;
}

bool MixedMatcher::holds_any(const Holder& holder, u32 ordinal, const View& view, u64 p, const std::vector<u32>& group_lengths) {
    return std::any_of(group_lengths.begin(), group_lengths.end(),
                       [&](u32 length) { return length <= p && has(holder, ordinal, view, p, length); });
}

bool MixedMatcher::resumes_at(const Holder& holder, u32 ordinal, const View& view, u64 p, const std::vector<u32>& group_lengths) {
    const Role group_role = role(holder, ordinal);
    if (group_role == Role::Full) return true;
    if (group_role == Role::State) return holds_any(holder, ordinal, view, p, group_lengths);
    const Group& group = holder.groups[ordinal];
    if (view.pins && group.sparse && c_.pinned_blocks.has(c_.prefixes.at(p), holder.seat, PinnedBlocks::kCheckpoint)) return true;
    const u64 window = *group.window;
    // The next token looks back window - 1 tokens; in a chunk, to the chunk's start.
    const u64 first = group_role == Role::Chunk ? p - p % window : p > window - 1 ? p - (window - 1) : 0;
    std::vector<u64> frontier{p};
    std::vector<bool> seen;
    if (group_lengths.size() > 1) seen.assign(p / c_.unit + 1, false);
    while (!frontier.empty()) {
        const u64 end = frontier.back();
        frontier.pop_back();
        if (end <= first) return true;
        for (u32 length : group_lengths) {
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
void MixedMatcher::count_tiers(const Holder& holder, const std::vector<u32>& demanding, Match& match) {
    const auto full = std::find_if(demanding.begin(), demanding.end(),
                                   [&](u32 ordinal) { return role(holder, ordinal) == Role::Full; });
    if (full == demanding.end() || match.gpu_tokens == match.tokens) {
        match.tier_tokens[0] = match.gpu_tokens;
        match.tier_tokens[1] = match.tokens - match.gpu_tokens;
        return;
    }
    const std::vector<u32> group_lengths = lengths_of(holder, *full, 0);
    const View view{kAllTiers, false};
    const std::vector<bool> reached = tiled(holder, *full, view, match.tokens, group_lengths);
    for (u64 end = match.tokens; end > 0;) {
        for (u32 length : group_lengths) {
            if (length > end || !reached[(end - length) / c_.unit] || !has(holder, *full, view, end, length)) continue;
            match.tier_tokens[fastest_tier(c_.nodes, node(end, length), holder.seat, *full)] += length;
            end -= length;
            break;
        }
    }
}

}  // namespace

void ModelHolders::classify(const Holder* holder) {
    MatchPlan& previous = plans_[holder];
    MatchPlan plan = make_match_plan(*holder, pins.count(holder) != 0);
    if (plan == previous) return;
    update_lists(holder, previous, false);
    update_lists(holder, plan, true);
    previous = std::move(plan);
}

void ModelHolders::remove(const Holder* holder) {
    update_lists(holder, plans_[holder], false);
    plans_.erase(holder);
}

void ModelHolders::update_lists(const Holder* holder, const MatchPlan& plan, bool on) {
    const auto list = [&](std::vector<const Holder*>& holders) {
        const auto at = std::lower_bound(holders.begin(), holders.end(), holder,
                                         [](const Holder* a, const Holder* b) { return a->id < b->id; });
        on ? holders.insert(at, holder) : holders.erase(at);
    };
    if (plan.is_mixed) list(mixed);
    if (plan.length == 0) return;
    UniformHolders& same_length = uniform[plan.length];
    list(same_length.holders);
    if (same_length.holders.empty()) {
        uniform.erase(plan.length);
        return;
    }
    Words& members = same_length.layouts[plan.layout];
    const std::size_t at = plan.seat / 64;
    const u64 bit = u64{1} << (plan.seat % 64);
    if (members.size() <= at) members.resize(at + 1);
    members[at] = on ? members[at] | bit : members[at] & ~bit;
    if (std::all_of(members.begin(), members.end(), [](u64 word) { return word == 0; })) {
        same_length.layouts.erase(plan.layout);
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
    for (const auto& [length, holders] : model.uniform) {
        match_planes(context, length, holders, matches);
    }
    MixedMatcher any(context);
    for (const Holder* holder : model.mixed) {
        const Match match = any.match(*holder);
        if (match.tokens != 0 || match.pinned_tokens != 0) matches.push_back(match);
    }
    if (model.uniform.size() + model.mixed.size() > 1) {
        std::sort(matches.begin(), matches.end(), [](const Match& a, const Match& b) { return a.holder < b.holder; });
    }
    return matches;
}

}  // namespace blockcast
