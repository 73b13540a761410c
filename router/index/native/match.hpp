// Longest usable prefix of a prompt on each holder: the largest position at which every group can resume, which vLLM's KV
// cache coordinator accepts as a hit. All holders are matched at once.
#pragma once

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <vector>

#include "holder.hpp"
#include "pins.hpp"

namespace blockcast {

struct Match {
    u64 holder, tokens, gpu_tokens, tier_tokens[kTiers], pinned_tokens;
};

using Words = std::vector<u64>;

// Blocks that one group needs in order to resume after a prefix.
struct GroupDemand {
    u32 ordinal;
    Role role;
    u64 blocks;   // length of the window or chunk in blocks
    bool sparse;  // a prompt in flight leaves only a checkpoint
    auto tied() const { return std::tie(ordinal, role, blocks, sparse); }
    bool operator<(const GroupDemand& other) const { return tied() < other.tied(); }
    bool operator==(const GroupDemand& other) const { return tied() == other.tied(); }
};

using Layout = std::vector<GroupDemand>;

// Holders whose blocks all have one length. Bits of a Words are seats.
struct UniformHolders {
    std::vector<const Holder*> holders;  // ascending by id
    std::map<Layout, Words> layouts;     // layout -> holders with it
};

// How a holder is matched.
struct MatchPlan {
    u32 length = 0;  // length of all its blocks; 0: they have several lengths, or it has none
    bool is_mixed = false;   // whether it is matched by itself
    Seat seat = 0;
    Layout layout;
    bool operator==(const MatchPlan& other) const {
        return std::tie(length, is_mixed, seat, layout) == std::tie(other.length, other.is_mixed, other.seat, other.layout);
    }
};

// Holders of one model, classified by how they are matched, so that a match need not do that.
struct ModelHolders : Model {
    std::unordered_map<const Holder*, u64> pins;  // holder -> number of its prompts in flight
    std::map<u32, UniformHolders> uniform;             // block length -> holders with only that length
    std::vector<const Holder*> mixed;            // other holders that have blocks, ascending by id

    // Classify a new holder, or one whose groups, seat, entries or pins have changed.
    void classify(const Holder* holder);
    void remove(const Holder* holder);
    bool empty() const { return plans_.empty(); }

private:
    void update_lists(const Holder* holder, const MatchPlan& plan, bool on);

    std::unordered_map<const Holder*, MatchPlan> plans_;
};

struct KeyMemo;

// One prompt, borrowed for one call.
struct Query {
    const u32* tokens;
    std::size_t count;
    u64 start;
    KeyMemo* memo = nullptr;  // set for a prompt of several calls
};

// Keys of a prompt's prefixes that were computed so far, as a decision matches, pins and counts the same prompt.
// keys[i] is the digest of [0, i * unit) from `start`. For one thread at a time.
struct KeyMemo {
    u64 start = 0, unit = 0;
    std::vector<u64> keys;

    bool serves(const Query& query, u64 wanted) const { return unit != 0 && wanted % unit == 0 && start == query.start; }

    void restart(const Query& query, u64 wanted) {
        start = query.start;
        unit = wanted;
        keys.clear();
        keys.reserve(query.count / unit + 1);
        keys.push_back(start);
    }

    // Copy the keys of another prompt that has the same first `shared` of `count` tokens.
    void resume(const KeyMemo& other, std::size_t shared, std::size_t count) {
        if (other.unit == 0) return;
        start = other.start;
        unit = other.unit;
        keys.reserve(count / unit + 1);
        keys.assign(other.keys.begin(), other.keys.begin() + static_cast<long>(std::min(other.keys.size(), shared / unit + 1)));
    }
};

std::vector<Match> match_all(const Query& query, const ModelHolders& model, const Digester& digester, const Nodes& nodes,
                             const Seats& seats, const PinnedBlocks& pinned_blocks);

// -- shared by match.cpp and match_planes.cpp --

template <class Visit>
void each_bit(u64 bits, std::size_t word, Visit visit) {
    for (; bits != 0; bits &= bits - 1) visit(static_cast<Seat>(word * 64 + static_cast<u32>(__builtin_ctzll(bits))));
}

// Digests of a prompt at multiples of `unit`, stored in the query's memo if it has one.
class Prefixes {
public:
    Prefixes(const Query& query, const Digester& digester, u64 unit)
        : query_(query), digester_(digester), memo_(query.memo == nullptr ? own_ : *query.memo) {
        if (!memo_.serves(query, unit)) memo_.restart(query, unit);
    }
    Prefixes(const Prefixes&) = delete;

    u64 at(u64 position) { return numbered(position / memo_.unit); }

    // Return the key of [0, index * unit).
    u64 numbered(std::size_t index) {
        if (index >= memo_.keys.size()) extend_to(index);
        return memo_.keys[index];
    }

    // Return all keys up to this one; the first is that of the empty prefix.
    const u64* up_to(std::size_t index) {
        numbered(index);
        return memo_.keys.data();
    }

    u64 unit() const { return memo_.unit; }

private:
    [[gnu::noinline]] void extend_to(std::size_t index) {
        while (memo_.keys.size() <= index) {
            const u64 from = (memo_.keys.size() - 1) * memo_.unit;
            memo_.keys.push_back(digester_.extend(memo_.keys.back(), query_.tokens + from, memo_.unit));
        }
    }

    const Query& query_;
    const Digester& digester_;
    KeyMemo own_;
    KeyMemo& memo_;
};

// Inputs of one match, borrowed.
struct Context {
    const Query& query;
    const ModelHolders& model;
    const Nodes& nodes;
    const Seats& seats;
    const PinnedBlocks& pinned_blocks;
    const std::vector<u32> lengths;  // block lengths in use, ascending
    const u64 unit;                  // their greatest common divisor
    const u64 limit;                 // longest usable prefix: the last token is always computed
    Prefixes& prefixes;
};

inline u32 fastest_tier(const Nodes& nodes, u32 id, Seat seat, u32 ordinal) {
    for (u32 tier = 0; tier + 1 < kTiers; ++tier) {
        if (nodes[id].presence.test(seat, ordinal * kTiers + tier)) return tier;
    }
    return kTiers - 1;
}

// match_planes.cpp: match the holders whose blocks all have `length` tokens, 64 at a time. `make_match_plan` finds them.
MatchPlan make_match_plan(const Holder& holder, bool pinned);
void match_planes(const Context& context, u32 length, const UniformHolders& uniform, std::vector<Match>& matches);

}  // namespace blockcast
