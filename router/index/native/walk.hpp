// What the ways of matching share: digests of the prompt as far as somebody asks, and who may be matched by bit planes.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "match.hpp"

namespace blockcast {

using Words = std::vector<u64>;

template <class Visit>
void each_bit(u64 bits, std::size_t word, Visit visit) {
    for (; bits != 0; bits &= bits - 1) visit(static_cast<Seat>(word * 64 + static_cast<u32>(__builtin_ctzll(bits))));
}

// Digests at multiples of `unit`, kept in the query's memo where it has one.
class Prefixes {
public:
    Prefixes(const Query& query, const Digester& digester, u64 unit)
        : query_(query), digester_(digester), memo_(query.memo == nullptr ? own_ : *query.memo) {
        if (!memo_.serves(query, unit)) memo_.restart(query, unit);
    }
    Prefixes(const Prefixes&) = delete;

    u64 at(u64 position) {
        const std::size_t index = position / memo_.unit;
        while (memo_.keys.size() <= index) {
            const u64 from = (memo_.keys.size() - 1) * memo_.unit;
            memo_.keys.push_back(digester_.extend(memo_.keys.back(), query_.tokens + from, memo_.unit, from, query_.media,
                                                  query_.media_count));
        }
        return memo_.keys[index];
    }

private:
    const Query& query_;
    const Digester& digester_;
    KeyMemo own_;
    KeyMemo& memo_;
};

// Everything one match needs; borrowed.
struct Context {
    const Query& query;
    const ModelHolders& model;
    const Nodes& nodes;
    const Seats& seats;
    const Promises& boundaries;
    const Promises& checkpoints;
    const std::vector<u32> lengths;  // block lengths in use, ascending
    const u64 unit;                  // their greatest common divisor
    const u64 limit;                 // the last token of a prompt is always computed
    Prefixes& prefixes;
};

inline void set_seat(Words& words, Seat seat) { words[seat / 64] |= u64{1} << (seat % 64); }

inline u32 fastest_tier(const Nodes& nodes, u32 id, Seat seat, u32 ordinal) {
    for (u32 tier = 0; tier + 1 < kTiers; ++tier) {
        if (nodes[id].presence.test(seat, ordinal * kTiers + tier)) return tier;
    }
    return kTiers - 1;
}

// match_planes.cpp: holders that cut all their blocks alike, 64 at a time. `planes_length` gives that length, or nothing
// where the holder does not fit; the holders of one call have the same.
std::optional<u32> planes_length(const Context& context, const Holder& holder);
std::vector<Match> match_planes(const Context& context, u32 length, const std::vector<const Holder*>& holders);

// match_any.cpp: any holder, one by one.
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

}  // namespace blockcast
