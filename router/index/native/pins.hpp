// Prompts in flight, as digests of the boundaries they will leave behind. Owns who promised which boundary, counted.
//
// Invariants: `holders` of a key has a seat's bit while the seat has promised the key at least once; a promise beyond the first
// is in `more_`. A shared system prompt is promised by everybody: one word says so, however many they are.
#pragma once

#include <vector>

#include "nodes.hpp"
#include "table.hpp"

namespace blockcast {

class Promises {
public:
    explicit Promises(Pages& pages) : table_(pages), more_(pages) {}
    Promises(const Promises&) = delete;
    ~Promises() {
        table_.each([&](Entry& entry) { entry.holders.drop(heap_); });
    }

    void add(u64 key, Seat seat) {
        Entry* entry = find(key);
        if (entry == nullptr) {
            Entry fresh{key, Presence()};
            fresh.holders.add(seat, 0, heap_);
            table_.insert(fresh);
        } else if (!entry->holders.add(seat, 0, heap_)) {
            More* more = find_more(key, seat);
            if (more == nullptr) {
                more_.insert(More{more_id(key, seat), 1, 0});
            } else {
                ++more->count;
            }
        }
    }

    void remove(u64 key, Seat seat) {
        Entry* entry = find(key);
        if (entry == nullptr) return;
        if (More* more = more_.size() == 0 ? nullptr : find_more(key, seat)) {
            if (--more->count == 0) more_.erase(more);
            return;
        }
        entry->holders.remove(seat, 0, heap_);
        if (entry->holders.empty()) table_.erase(entry);
    }

    // A prompt's boundaries lie scattered: ask for some before they are needed.
    void add_all(const std::vector<u64>& keys, Seat seat) {
        for (std::size_t i = 0; i < keys.size(); ++i) {
            if (i + kAhead < keys.size()) prefetch(keys[i + kAhead]);
            add(keys[i], seat);
        }
    }
    void remove_all(const std::vector<u64>& keys, Seat seat) {
        for (std::size_t i = 0; i < keys.size(); ++i) {
            if (i + kAhead < keys.size()) prefetch(keys[i + kAhead]);
            remove(keys[i], seat);
        }
    }

    static constexpr std::size_t kAhead = 12;
    void prefetch(u64 key) const { table_.prefetch(hash_of(key)); }

    // visit(word index, bits of the seats that promised the key)
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

    // Keys are 61-bit digests with a random base: mixed with a seat they are as unlikely to collide as they are alone.
    static u64 more_id(u64 key, Seat seat) { return key * 0xD6E8FEB86659FD93ull + seat; }
    Entry* find(u64 key) const {
        return table_.find(hash_of(key), [&](const Entry& entry) { return entry.key == key; });
    }
    More* find_more(u64 key, Seat seat) const {
        const u64 id = more_id(key, seat);
        return more_.find(hash_of(id), [&](const More& more) { return more.id == id; });
    }

    SegmentedTable<Entry, Traits> table_;
    SegmentedTable<More, MoreTraits> more_;
    std::size_t heap_ = 0;
};

}  // namespace blockcast
