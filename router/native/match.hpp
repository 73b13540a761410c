// How much of a prompt each holder could reuse: the native twin of router/index_match.py, for all holders at once. Owns
// the walk. Refuses to know events and names.
#pragma once

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

// One prompt. Borrowed for the length of one `match` under the reader's lock.
struct Query {
    const u32* tokens;
    std::size_t count;
    u64 start;
    const Media* media;
    std::size_t media_count;
};

std::vector<Match> match_all(const Query& query, const ModelHolders& model, const Digester& digester, const Nodes& nodes,
                             const Seats& seats, const Promises& boundaries, const Promises& checkpoints);

}  // namespace blockcast
