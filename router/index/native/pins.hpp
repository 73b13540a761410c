// Pins: prompts in flight, as digests of the block boundaries that they will leave in a cache, with a count for each holder.
//
// Invariants: `holders` of a key has a seat's bit while the seat has a pin of the key; further pins of the same seat and key
// are counted in `more_`. One bit set is enough for a system prompt that is pinned on every holder.
//
// A prompt pins its last boundary, and each pinned boundary pins the one before it. So a conversation that runs together with
// its previous turn stores only its new boundaries.
#pragma once

#include <map>
#include <vector>

#include "nodes.hpp"
#include "table.hpp"

namespace blockcast {

class PinnedBlocks {
public:
    explicit PinnedBlocks(Pages& pages) : table_(pages), more_(pages) {}
    PinnedBlocks(const PinnedBlocks&) = delete;
    ~PinnedBlocks() {
        table_.each([&](Entry& entry) { entry.holders.drop(heap_); });
    }

    // Add a pin of a seat; returns whether it is the first one for the key.
    bool add(u64 key, Seat seat) {
        const Table::HashSlot spot = table_.spot(hash_of(key));
        Entry* entry = find(spot, key);
        if (entry == nullptr) {
            Entry fresh{key, Presence()};
            fresh.holders.add(seat, 0, heap_);
            table_.insert(spot, fresh);
            return true;
        }
        if (entry->holders.add(seat, 0, heap_)) return true;
        More* more = find_more(key, seat);
        if (more == nullptr) {
            more_.insert(More{more_id(key, seat), 1, 0});
        } else {
            ++more->count;
        }
        return false;
    }

    // Remove a pin of a seat; returns whether it was the last one for the key.
    bool remove(u64 key, Seat seat) {
        const Table::HashSlot spot = table_.spot(hash_of(key));
        Entry* entry = find(spot, key);
        if (entry == nullptr) return false;
        if (More* more = more_.size() == 0 ? nullptr : find_more(key, seat)) {
            if (--more->count == 0) more_.erase(more);
            return false;
        }
        entry->holders.remove(seat, 0, heap_);
        if (entry->holders.empty()) table_.erase(spot, entry);
        return true;
    }

    static constexpr std::size_t kAhead = 12;
    void prefetch(u64 key) const { table_.prefetch(hash_of(key)); }

    // Call visit(word index, bits of the seats with a pin of the key).
    template <class Visit>
    void each(u64 key, Visit visit) const {
        if (const Entry* entry = find(key)) {
            entry->holders.each([&](u32, u32 word, u64 bits) { visit(word, bits); });
        }
    }

    bool has(u64 key, Seat seat) const {
        const Entry* entry = find(key);
        return entry != nullptr && entry->holders.test(seat, 0);
    }

    bool empty() const { return table_.size() == 0; }
    std::size_t bytes() const { return table_.bytes() + more_.bytes() + heap_; }

private:
    struct Entry {
        u64 key;
        Presence holders;
    };
    struct More {
        u64 id;
        u32 count, unused;
    };
    static u32 hash_of(u64 key) { return static_cast<u32>(keyed(key) >> 32); }
    struct Traits {
        static u32 hash(const Entry& entry) { return hash_of(entry.key); }
    };
    struct MoreTraits {
        static u32 hash(const More& more) { return hash_of(more.id); }
    };

    // Keys are 61-bit digests with a random base, and mixed with a seat they collide as rarely.
    static u64 more_id(u64 key, Seat seat) { return key * 0xD6E8FEB86659FD93ull + seat; }
    using Table = SegmentedTable<Entry, Traits>;
    Entry* find(const typename Table::HashSlot& spot, u64 key) const {
        return table_.find(spot, [&](const Entry& entry) { return entry.key == key; });
    }
    Entry* find(u64 key) const { return find(table_.spot(hash_of(key)), key); }
    More* find_more(u64 key, Seat seat) const {
        const u64 id = more_id(key, seat);
        return more_.find(hash_of(id), [&](const More& more) { return more.id == id; });
    }

    Table table_;
    SegmentedTable<More, MoreTraits> more_;
    std::size_t heap_ = 0;
};

// Boundaries of pinned prompts, by block length.
class Boundaries {
public:
    explicit Boundaries(Pages& pages) : pages_(pages) {}

    // `keys`: keys of all boundaries of a prompt, in their order.
    void add(const std::vector<u64>& keys, Seat seat, u64 cut) {
        PinnedBlocks& promises = cuts_.try_emplace(cut, pages_).first->second;
        for (std::size_t i = keys.size(); i > 0; --i) {
            if (i > PinnedBlocks::kAhead) promises.prefetch(keys[i - 1 - PinnedBlocks::kAhead]);
            if (!promises.add(keys[i - 1], seat)) break;
        }
    }
    void remove(const std::vector<u64>& keys, Seat seat, u64 cut) {
        const auto found = cuts_.find(cut);
        if (found == cuts_.end()) return;
        PinnedBlocks& promises = found->second;
        for (std::size_t i = keys.size(); i > 0; --i) {
            if (i > PinnedBlocks::kAhead) promises.prefetch(keys[i - 1 - PinnedBlocks::kAhead]);
            if (!promises.remove(keys[i - 1], seat)) break;
        }
        if (promises.empty() && cuts_.size() > kCutsKept) cuts_.erase(found);
    }

    void prefetch(u64 key) const {
        for (const auto& [cut, promises] : cuts_) promises.prefetch(key);
    }
    template <class Visit>
    void each(u64 key, Visit visit) const {
        for (const auto& [cut, promises] : cuts_) promises.each(key, visit);
    }
    bool has(u64 key, Seat seat) const {
        for (const auto& [cut, promises] : cuts_) {
            if (promises.has(key, seat)) return true;
        }
        return false;
    }
    std::size_t bytes() const {
        std::size_t sum = 0;
        for (const auto& [cut, promises] : cuts_) sum += promises.bytes();
        return sum;
    }

private:
    static constexpr std::size_t kCutsKept = 2;  // empty tables that are stored for the next prompts
    Pages& pages_;
    std::map<u64, PinnedBlocks> cuts_;
};

}  // namespace blockcast
