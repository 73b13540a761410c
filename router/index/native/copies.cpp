// Events that leave out what they are about, read by what is known: a store or removal without a group in a stream whose
// other events carry groups (LMCache), and a store without tokens (vLLM's offloading). Such an event adds presences or takes
// them away on its own tier; it never makes a group, and a group is known by what others said of it.
#include <algorithm>

#include "holder.hpp"

namespace blockcast {

bool Holder::grouped() const {
    return std::any_of(groups.begin(), groups.end(), [](const Group& group) { return group.key && group.heard; });
}

// The groups that an event without one can be about, the likeliest first. None where the stream has no groups.
std::vector<u32> Holder::homes() const {
    std::vector<u32> homes;
    for (u32 i = 0; i < groups.size(); ++i) {
        if (groups[i].key && groups[i].heard) homes.push_back(i);
    }
    std::sort(homes.begin(), homes.end(), [&](u32 a, u32 b) {
        return std::make_pair(!groups[a].teaches(), *groups[a].key) < std::make_pair(!groups[b].teaches(), *groups[b].key);
    });
    return homes;
}

// The one of `homes` that holds the first known name; where nobody knows any, full attention's.
std::optional<u32> Holder::home(const std::vector<u32>& homes, const u64* names, std::size_t count) const {
    if (homes.empty()) return std::nullopt;
    for (std::size_t i = 0; i < count; ++i) {
        const auto holds = [&](u32 ordinal) { return find_fastest(names[i], ordinal) != nullptr; };
        const auto best = std::find_if(homes.begin(), homes.end(), holds);
        if (best != homes.end()) return *best;
    }
    return homes.front();
}

// A block may leave one tier in the batch that tells of its copy on another, and before it: where it stood is kept.
void Holder::remember(const Batch& batch, const Stored& event) {
    for (std::size_t i = 0; event.bare() && i < event.names.count; ++i) {
        const u64 name = batch.names[event.names.begin + i];
        if (const std::optional<NamePosition> place = place_of(name)) taught_.insert_or_assign(name, *place);
    }
}

// Names without tokens are copies of known blocks. What nobody has spelt out is counted and does not wait: its tokens may
// never come, and without them it says nothing.
void Holder::store_copies(const Batch& batch, const Stored& event, Report& report) {
    const u64* names = batch.names.data() + event.names.begin;
    const std::vector<u32> known = event.group ? std::vector<u32>() : homes();
    std::vector<u64> placed;
    for (std::size_t i = 0; i < event.names.count; ++i) {
        const std::optional<NamePosition> place = place_of(names[i]);
        std::optional<u32> ordinal = home(known, &names[i], 1);
        if (!ordinal) ordinal = find_ordinal(event.group);
        const u64 length = place && ordinal ? length_of_copy(names[i], *ordinal, event.block_size) : 0;
        if (length == 0 || length > std::min<u64>(place->end, kBlockSizeMax)) {
            ++report.unknown_copies;
            continue;
        }
        if (!has_room(*ordinal, static_cast<u32>(length), 1)) {
            ++report.refused;
            continue;
        }
        add(names[i], *place, *ordinal * kTiers + event.tier, static_cast<u32>(length));
        worked(1);
        placed.push_back(names[i]);
    }
    report.stored += placed.size();
    wake(placed.data(), placed.size());
}

// As the group holds the name on its fastest tier; else as the event says; else as the group's last event said. 0: unknown.
u64 Holder::length_of_copy(u64 name, u32 ordinal, u32 told) const {
    if (const NameEntry* entry = find_fastest(name, ordinal)) return nodes_[entry->node].length;
    if (told != 0) return told;
    const Group& group = groups[ordinal];
    return group.heard || group.declared ? group.block_size.value_or(0) : 0;
}

}  // namespace blockcast
