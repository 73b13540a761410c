// Pins: prompts in flight, as presences at the block boundaries that they will leave in a cache.
#pragma once

#include <map>
#include <vector>

#include "nodes.hpp"

namespace blockcast {

// Blocks that prompts in flight will leave in the caches of their holders: a boundary after every block, and a checkpoint, the
// last boundary, where groups with states or sparse windows will resume. Prompts of one seat and block length share their
// boundaries, which are counted.
//
// A prompt pins its last boundary, and each pinned boundary pins the one before it, so that a turn which runs together with
// the previous one of its conversation stores only its new boundaries.
class PinnedBlocks {
public:
    enum Kind : u32 { kBoundary, kCheckpoint };

    explicit PinnedBlocks(Pages& pages) : nodes_(pages) {}

    // `boundaries`: keys of all boundaries of a prompt, in their order, `length` tokens apart.
    void add(const std::vector<u64>& boundaries, const std::optional<u64>& checkpoint, Seat seat, u32 length) {
        ++prompts_by_length_[length];
        for (std::size_t i = boundaries.size(); i > 0; --i) {
            const u32 end = static_cast<u32>(i) * length;
            if (!nodes_.add(nodes_.find_or_create(boundaries[i - 1], end, length), seat, kBoundary)) break;
        }
        if (checkpoint) nodes_.add(nodes_.find(*checkpoint, length), seat, kCheckpoint);
    }

    void remove(const std::vector<u64>& boundaries, const std::optional<u64>& checkpoint, Seat seat, u32 length) {
        if (checkpoint) nodes_.remove(nodes_.find(*checkpoint, length), seat, kCheckpoint);
        for (std::size_t i = boundaries.size(); i > 0; --i) {
            if (!nodes_.remove(nodes_.find(boundaries[i - 1], length), seat, kBoundary)) break;
        }
        if (--prompts_by_length_[length] == 0) prompts_by_length_.erase(length);
    }

    // Call visit(kind, word index, bits of the seats with such a pin of the key).
    template <class Visit>
    void each(u64 key, Visit visit) const {
        for (const auto& [length, prompts] : prompts_by_length_) {
            if (const u32 id = nodes_.find(key, length)) nodes_[id].presence.each(visit);
        }
    }

    bool has(u64 key, Seat seat, Kind kind) const {
        for (const auto& [length, prompts] : prompts_by_length_) {
            const u32 id = nodes_.find(key, length);
            if (id != 0 && nodes_[id].presence.test(seat, kind)) return true;
        }
        return false;
    }

    std::size_t bytes() const { return nodes_.bytes(); }

private:
    Nodes nodes_;                 // of boundaries; a node's length is their distance
    std::map<u32, u64> prompts_by_length_;  // distance of boundaries -> number of prompts
};

}  // namespace blockcast
