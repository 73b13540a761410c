// Groups, names and seat of a holder. holder_events.cpp applies events to them.
#include "holder.hpp"

#include <algorithm>

namespace blockcast {

namespace {

bool names_full_attention(const std::string& kind) {
    return kind == "full_attention" || kind == "mla_attention" || kind == "sink_full_attention";
}

}  // namespace

// -- groups -----------------------------------------------------------------------------------------------------------

void Group::describe(const Group& other) {
    if (other.kind && !other.kind->empty()) kind = other.kind;
    if (other.block_size.value_or(0) - 1 < kBlockSizeMax) block_size = other.block_size;
    if (other.window.value_or(0)) window = other.window;
    reclassify();
}

void Group::reclassify() {
    const std::string name = kind.value_or("");
    is_full_attention_ = !kind || names_full_attention(name);
    if (name == "encoder_only_attention" || name == "cross_attention") {
        role_ = Role::Ignored;
    } else if (name == "mamba") {
        role_ = Role::State;
    } else if (window && (name == "sliding_window" || name == "sliding_window_mla")) {
        role_ = Role::Window;
    } else if (window && name == "chunked_local_attention") {
        role_ = Role::Chunk;
    } else {
        role_ = Role::Full;
    }
}

void Group::count(u32 length, int by) {
    const auto at = std::lower_bound(lengths.begin(), lengths.end(), std::make_pair(length, u64{0}));
    if (at == lengths.end() || at->first != length) {
        lengths.insert(at, {length, static_cast<u64>(by)});
        return;
    }
    at->second += static_cast<u64>(static_cast<std::int64_t>(by));
    if (at->second == 0) lengths.erase(at);
}

u64 Group::names() const {
    u64 sum = 0;
    for (const auto& [length, names] : lengths) sum += names;
    return sum;
}

u64 Group::tokens() const {
    u64 sum = 0;
    for (const auto& [length, names] : lengths) sum += length * names;
    return sum;
}

std::optional<u32> Holder::find_ordinal(const std::optional<std::int64_t>& key) const {
    for (u32 i = 0; i < groups.size(); ++i) {
        if (groups[i].key == key) return i;
    }
    return std::nullopt;
}

u32 Holder::ordinal(const std::optional<std::int64_t>& key) {
    if (const std::optional<u32> known = find_ordinal(key)) return *known;
    // Slots distinguish kGroupsMax groups, more than any engine has. Further groups share the last one.
    if (groups.size() == kGroupsMax) return kGroupsMax - 1;
    groups.emplace_back().key = key;
    return static_cast<u32>(groups.size() - 1);
}

// Return whether the group may hold `count` more blocks of this length.
bool Holder::has_room(u32 ordinal, u32 length, std::size_t count) const {
    if (names_.size() + count > kHolderNamesMax) return false;
    const auto& group_lengths = groups[ordinal].lengths;
    if (group_lengths.size() == 1 && group_lengths[0].first == length) return true;
    const auto known = [&](const std::pair<u32, u64>& one) { return one.first == length; };
    if (std::any_of(group_lengths.begin(), group_lengths.end(), known)) return true;
    std::size_t lengths = 0;
    for (const Group& group : groups) lengths += group.lengths.size();
    return lengths < kLengthsMax;
}

void Holder::declare(const std::vector<Group>& declared) {
    for (Group& group : groups) group.declared = false;
    for (const Group& from : declared) {
        Group& group = groups[ordinal(from.key)];
        group.declared = true;
        group.describe(from);
    }
    full_stores_ = 0;
}

u32 Holder::pin_length() const {
    u64 stored_length = 0, announced_length = 0;
    for (const Group& group : groups) {
        if (!demands(group)) continue;
        if (group.role() == Role::Full && !group.lengths.empty()) {
            const u64 least = group.lengths.front().first;
            stored_length = stored_length == 0 ? least : std::min(stored_length, least);
        }
        if (group.block_size && (announced_length == 0 || *group.block_size < announced_length)) announced_length = *group.block_size;
    }
    return static_cast<u32>(stored_length != 0 ? stored_length : announced_length != 0 ? announced_length : 16);
}

// -- clearing ---------------------------------------------------------------------------------------------------------

void Holder::drop_blocks() {
    ++changes_;
    parking_.clear();
    for (Group& group : groups) group.lengths.clear();
    if (names_.size() <= kForgottenAtOnce) {
        PendingCleanup few{std::move(names_), seat};
        while (seats_.drain_some(few)) {
        }
        return;
    }
    seats_.queue_cleanup(PendingCleanup{std::move(names_), seat});
    seat = seats_.take();
}

// Remove all blocks on one tier.
void Holder::clear_tier(u32 tier, Report& report) {
    std::vector<std::pair<u64, u32>> entries;
    const auto collect = [&](u64 name, u32, u32 slot, u32) {
        if (slot % kTiers == tier) entries.emplace_back(name, slot);
    };
    constexpr std::size_t kNamesPerPart = 450;  // on average
    for (std::size_t part = 0; each_name(part, collect); ++part) lock_->count_changes(kNamesPerPart);
    for (const auto& [name, slot] : entries) {
        remove(name, slot, 0);
        lock_->count_changes(1);
    }
    report.removed += entries.size();
    parking_.clear_tier(tier);
}

void Holder::clear() {
    drop_blocks();
    std::vector<Group> kept;
    for (Group& group : groups) {
        group.announced = group.sparse = false;
        if (group.declared) kept.push_back(group);
    }
    groups = std::move(kept);
    full_stores_ = 0;
}

void Holder::detach() {
    drop_blocks();
    seats_.queue_cleanup(PendingCleanup{Names(pages_), seat});
}

// -- names ------------------------------------------------------------------------------------------------------------

std::optional<NamePosition> Holder::position_of(u64 name) const {
    if (const auto position = batch_positions_.find(name); position != batch_positions_.end()) return position->second;
    const NameEntry* entry = find(name);
    if (entry == nullptr) return std::nullopt;
    return NamePosition{nodes_[entry->node].key, nodes_[entry->node].end};
}

void Holder::add(u64 name, const NamePosition& position, u32 slot, u32 length, u32 copies) {
    const NameEntry* known = nullptr;  // an entry of the name in any slot
    NameEntry* entry = names_.find(NameTraits::hash_of(name), [&](const NameEntry& other) {
        if (other.name != name) return false;
        known = &other;
        return slot_of(other.meta) == slot;
    });
    if (known != nullptr && (nodes_[known->node].key != position.key || nodes_[known->node].end != position.end)) {
        forget_name(name);  // the engine reuses the name for another block: the newest event counts
        entry = nullptr;
    }
    if (entry != nullptr) return add_copies(entry->node, entry->meta, position, slot, length, copies);
    const u32 node = nodes_.find_or_create(position.key, static_cast<u32>(position.end), length);
    nodes_.add(node, seat, slot);
    try {
        names_.insert(NameEntry{name, node, slot << 23 | copies});
    } catch (const std::length_error&) {  // a few names in all slots, out of millions that a worker makes up: one stays unknown
        nodes_.remove(node, seat, slot);
        return;
    }
    groups[slot / kTiers].count(length, +1);
}

// Store a name that the slot holds already: another copy, or the same block with another length.
void Holder::add_copies(u32& node, u32& meta, const NamePosition& position, u32 slot, u32 length, u32 copies) {
    const u32 before = nodes_[node].length;
    if (before != length) {
        const u32 moved = nodes_.find_or_create(position.key, static_cast<u32>(position.end), length);
        nodes_.add(moved, seat, slot);
        nodes_.remove(node, seat, slot);
        node = moved;
        groups[slot / kTiers].count(before, -1);
        groups[slot / kTiers].count(length, +1);
    }
    if (!reannounces) meta += std::min(copies, kCopies - (meta & kCopies));
}

// Set the number of copies after a removal, `left` or one fewer, unless it is 0; return whether copies are left.
bool Holder::set_copies_left(u32& meta, std::optional<u32> left) const {
    const u32 before = meta & kCopies, copies = !left ? before - 1 : reannounces ? std::min(*left, 1u) : *left;
    if (copies != 0) meta = (meta & ~kCopies) | copies;
    return copies != 0;
}

bool Holder::remove(u64 name, u32 slot, std::optional<u32> left) {
    NameEntry* entry = find(name, slot);
    if (entry == nullptr) return false;
    if (set_copies_left(entry->meta, left)) return true;
    // Blocks that leave a sliding window are expected to go and are not recorded as lost.
    const Role role = groups[slot / kTiers].role();
    if (role == Role::Full || role == Role::State) removed_blocks_.record(nodes_[entry->node].key, id);
    erase(entry);
    return true;
}

void Holder::forget_name(u64 name) {
    while (NameEntry* entry = find(name)) erase(entry);
}

void Holder::erase(NameEntry* entry) {
    const u32 slot = slot_of(entry->meta);
    groups[slot / kTiers].count(nodes_[entry->node].length, -1);
    nodes_.remove(entry->node, seat, slot);
    names_.erase(entry);
}

// -- seats -------------------------------------------------------------------------------------------------------------

Seat Seats::take() {
    if (!free_.empty()) {
        const Seat seat = free_.back();
        free_.pop_back();
        return seat;
    }
    if (count_ > kSeatMax) throw std::length_error("the index is full: too many holders");
    return count_++;
}

void Seats::queue_cleanup(PendingCleanup cleanup) {
    cleanups_.push_back(std::move(cleanup));
}

bool Seats::drain_some(PendingCleanup& cleanup) {
    return cleanup.names.drain_some([&](const NameEntry& entry) {
        nodes_.remove(entry.node, cleanup.seat, Holder::slot_of(entry.meta));
    });
}

bool Seats::clean_up_segment() {
    if (cleanups_.empty()) return false;
    PendingCleanup& cleanup = cleanups_.back();
    if (drain_some(cleanup)) return true;
    free_.push_back(cleanup.seat);
    cleanups_.pop_back();
    return !cleanups_.empty();
}

std::size_t Seats::bytes() const {
    std::size_t sum = free_.capacity() * sizeof(Seat);
    for (const PendingCleanup& cleanup : cleanups_) sum += cleanup.names.bytes();
    return sum;
}

}  // namespace blockcast
