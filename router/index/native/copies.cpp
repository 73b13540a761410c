// Incomplete events: a store or removal without a group in a stream whose other events carry groups (LMCache), and a store
// without tokens (vLLM's offloading). Such an event adds or removes blocks on its own tier. It never creates a group and never
// changes the properties of one.
#include <algorithm>

#include "holder.hpp"

namespace blockcast {

bool Holder::grouped() const {
    return std::any_of(groups.begin(), groups.end(), [](const Group& group) { return group.key && group.announced; });
}

// Return the groups that an event without a group may refer to, the likeliest first; empty if the stream has no groups.
std::vector<u32> Holder::candidate_groups() const {
    std::vector<u32> candidates;
    for (u32 i = 0; i < groups.size(); ++i) {
        if (groups[i].key && groups[i].announced) candidates.push_back(i);
    }
    std::sort(candidates.begin(), candidates.end(), [&](u32 a, u32 b) {
        const auto rank = [&](u32 at) { return std::make_pair(!groups[at].is_full_attention(), *groups[at].key); };
        return rank(a) < rank(b);
    });
    return candidates;
}

// Return the candidate that holds the first known name; the first candidate if no name is known.
std::optional<u32> Holder::find_group(const std::vector<u32>& candidates, const u64* names, std::size_t count) const {
    if (candidates.empty()) return std::nullopt;
    for (std::size_t i = 0; i < count; ++i) {
        const auto holds = [&](u32 ordinal) { return find_fastest(names[i], ordinal) != nullptr; };
        const auto best = std::find_if(candidates.begin(), candidates.end(), holds);
        if (best != candidates.end()) return *best;
    }
    return candidates.front();
}

// Keep the positions of copied blocks: an earlier event of the same batch may remove such a block from its only other tier.
void Holder::keep_positions(const Batch& batch, const Stored& event) {
    for (std::size_t i = 0; event.has_no_tokens() && i < event.names.count; ++i) {
        const u64 name = batch.names[event.names.begin + i];
        if (const std::optional<NamePosition> position = position_of(name)) batch_positions_.insert_or_assign(name, *position);
    }
}

// Store names without tokens: copies of known blocks. An unknown name is counted and not parked, as its tokens may never come.
void Holder::store_copies(const Batch& batch, const Stored& event, Report& report) {
    const u64* names = batch.names.data() + event.names.begin;
    const std::vector<u32> candidates = event.group ? std::vector<u32>() : candidate_groups();
    std::vector<u64> stored_names;
    for (std::size_t i = 0; i < event.names.count; ++i) {
        const std::optional<NamePosition> position = position_of(names[i]);
        std::optional<u32> ordinal = find_group(candidates, &names[i], 1);
        if (!ordinal) ordinal = find_ordinal(event.group);
        const u64 length = position && ordinal ? length_of_copy(names[i], *ordinal, event.block_size) : 0;
        if (length == 0 || length > std::min<u64>(position->end, kBlockSizeMax)) {
            ++report.unknown_copies;
            continue;
        }
        if (!has_room(*ordinal, static_cast<u32>(length), 1)) {
            ++report.refused;
            continue;
        }
        add(names[i], *position, *ordinal * kTiers + event.tier, static_cast<u32>(length));
        count_changed_blocks(1);
        stored_names.push_back(names[i]);
    }
    report.stored += stored_names.size();
    wake(stored_names.data(), stored_names.size(), report);
}

// Return the length of a copied block: that of the copy on the group's fastest tier, else the event's, else that of the group's
// last event; 0 if it is unknown.
u64 Holder::length_of_copy(u64 name, u32 ordinal, u32 event_length) const {
    if (const NameEntry* entry = find_fastest(name, ordinal)) return nodes_[entry->node].length;
    if (event_length != 0) return event_length;
    const Group& group = groups[ordinal];
    return group.announced || group.declared ? group.block_size.value_or(0) : 0;
}

}  // namespace blockcast
