// How much of a prompt each holder could reuse: the native twin of router/index/match.py, for all holders at once. Owns
// the walk. Refuses to know events and names.
#pragma once

#include <algorithm>
#include <vector>

#include "holder.hpp"
#include "pins.hpp"

namespace blockcast {

struct Match {
    u64 holder, tokens, gpu_tokens, tier_tokens[kTiers], pinned_tokens;
};

struct ModelHolders : Model {
    std::vector<const Holder*> holders;                     // in the order they were added
    std::unordered_map<const Holder*, u64> pins;            // holders with prompts in flight, and how many
};

struct KeyMemo;

// One prompt. Borrowed for the length of one call.
struct Query {
    const u32* tokens;
    std::size_t count;
    u64 start;
    const Media* media;
    std::size_t media_count;
    KeyMemo* memo = nullptr;  // of a prompt that several calls are about
};

// Keys of one prompt's prefixes, as far as a call has computed them: a decision matches, pins and counts the same prompt.
// keys[i] is the digest of [0, i * unit) from `start` with `media`. One thread at a time.
struct KeyMemo {
    u64 start = 0, unit = 0;
    std::vector<Media> media;
    std::vector<u64> keys;

    bool serves(const Query& query, u64 wanted) const {
        if (unit == 0 || wanted % unit != 0 || start != query.start || media.size() != query.media_count) return false;
        return std::equal(media.begin(), media.end(), query.media,
                          [](const Media& a, const Media& b) { return a.position == b.position && a.key == b.key; });
    }

    void restart(const Query& query, u64 wanted) {
        start = query.start;
        unit = wanted;
        media.assign(query.media, query.media + query.media_count);
        keys.clear();
        keys.reserve(query.count / unit + 1);
        keys.push_back(start);
    }
};

std::vector<Match> match_all(const Query& query, const ModelHolders& model, const Digester& digester, const Nodes& nodes,
                             const Seats& seats, const Promises& boundaries, const Promises& checkpoints);

}  // namespace blockcast
