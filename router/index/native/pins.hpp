// Pins: prompts in flight, as presences at the block boundaries that they will leave in a cache.
#pragma once

#include <map>
#include <vector>

#include "nodes.hpp"

namespace blockcast {

// What a prompt in flight leaves behind for each holder: a boundary after every block, and a checkpoint, the last of these, where
// groups with states or sparse windows will resume. Prompts of one seat that are cut alike share their boundaries, counted.
//
// A prompt pins its last boundary, and each pinned boundary pins the one before it. So a conversation that runs together with
// its previous turn stores only its new boundaries.
class PinnedBlocks {
public:
    enum Kind : u32 { kBoundary, kCheckpoint };

    explicit PinnedBlocks(Pages& pages) : nodes_(pages) {}

    // `boundaries`: keys of all boundaries of a prompt, in their order, `cut` tokens apart.
    void add(const std::vector<u64>& boundaries, const std::optional<u64>& checkpoint, Seat seat, u32 cut) {
        ++cuts_[cut];
        for (std::size_t i = boundaries.size(); i > 0; --i) {
            const u32 end = static_cast<u32>(i) * cut;
            if (!nodes_.add(nodes_.find_or_make(boundaries[i - 1], end, cut), seat, kBoundary)) break;
        }
        if (checkpoint) nodes_.add(nodes_.find(*checkpoint, cut), seat, kCheckpoint);
    }

    void remove(const std::vector<u64>& boundaries, const std::optional<u64>& checkpoint, Seat seat, u32 cut) {
        if (checkpoint) nodes_.remove(nodes_.find(*checkpoint, cut), seat, kCheckpoint);
        for (std::size_t i = boundaries.size(); i > 0; --i) {
            if (!nodes_.remove(nodes_.find(boundaries[i - 1], cut), seat, kBoundary)) break;
        }
        if (--cuts_[cut] == 0) cuts_.erase(cut);
    }

    // Call visit(kind, word index, bits of the seats with such a pin of the key).
    template <class Visit>
    void each(u64 key, Visit visit) const {
        for (const auto& [cut, prompts] : cuts_) {
            if (const u32 id = nodes_.find(key, cut)) nodes_[id].presence.each(visit);
        }
    }

    bool has(u64 key, Seat seat, Kind kind) const {
        for (const auto& [cut, prompts] : cuts_) {
            const u32 id = nodes_.find(key, cut);
            if (id != 0 && nodes_[id].presence.test(seat, kind)) return true;
        }
        return false;
    }

    std::size_t bytes() const { return nodes_.bytes(); }

private:
    Nodes nodes_;                 // of boundaries; a node's length is their distance
    std::map<u32, u64> cuts_;  // distance of boundaries -> number of prompts
};

}  // namespace blockcast
