// Seats of holders, and the scratch table of names that a batch spells out.
#include "holder.hpp"

namespace blockcast {

Seat Seats::take(Holder* owner) {
    if (!free_.empty()) {
        const Seat seat = free_.back();
        free_.pop_back();
        owners_[seat] = owner;
        return seat;
    }
    if (owners_.size() > kSeatMax) throw std::length_error("the index is full: too many holders");
    owners_.push_back(owner);
    return static_cast<Seat>(owners_.size() - 1);
}

void Seats::retire(Estate estate) {
    owners_[estate.seat] = nullptr;
    estates_.push_back(std::move(estate));
}

bool Seats::settle_some() {
    if (estates_.empty()) return false;
    Estate& estate = estates_.back();
    const bool more = estate.names.drain_some([&](const NameEntry& entry) {
        Holder::each_slot(entry, estate.links, [&](u32 node, u32 meta) {
            nodes_.remove(node, estate.seat, Holder::slot_of(meta));
        });
    });
    if (more) return true;
    free_.push_back(estate.seat);
    estates_.pop_back();
    return !estates_.empty();
}

std::size_t Seats::bytes() const {
    std::size_t sum = owners_.capacity() * sizeof(Holder*);
    for (const Estate& estate : estates_) sum += estate.names.bytes() + estate.links.bytes();
    return sum;
}

void Taught::clear(std::size_t names) {
    names_ = 0;
    ++epoch_;
    while (entries_.size() < 2 * names + 16) grow();
}

void Taught::grow() {
    std::vector<Entry> old(entries_.empty() ? 32 : entries_.size() * 2, Entry{0, {}, 0});
    old.swap(entries_);
    shift_ = 64 - static_cast<u32>(__builtin_ctzll(entries_.size()));
    names_ = 0;
    for (const Entry& entry : old) {
        if (entry.epoch == epoch_) put(entry.name, entry.place);
    }
}

void Taught::put(u64 name, const Place& place) {
    if (2 * names_ + 16 > entries_.size()) grow();
    for (std::size_t at = home(name);; at = (at + 1) & (entries_.size() - 1)) {
        Entry& entry = entries_[at];
        if (entry.epoch == epoch_ && entry.name != name) continue;
        names_ += entry.epoch != epoch_;
        entry = Entry{name, place, epoch_};
        return;
    }
}

const Place* Taught::get(u64 name) const {
    if (names_ == 0) return nullptr;
    for (std::size_t at = home(name);; at = (at + 1) & (entries_.size() - 1)) {
        const Entry& entry = entries_[at];
        if (entry.epoch != epoch_) return nullptr;
        if (entry.name == name) return &entry.place;
    }
}

}  // namespace blockcast
