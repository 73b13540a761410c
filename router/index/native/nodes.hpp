// Cached blocks of all holders: the map from (prefix digest, block length) to a node, and each node's set of presences.
//
// A presence is (seat, slot): `seat` is a holder's dense number, `slot` = group ordinal * 4 + tier. Invariants: a node
// exists while it has a presence; a presence that was added k times has to be removed k times (k > 1 is rare and counted
// apart).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <unordered_map>

#include "table.hpp"

namespace blockcast {

using Seat = u32;
constexpr u32 kTiers = 4;
constexpr u32 kSlotMax = 255;
constexpr u32 kSeatMax = (1u << 22) - 1;

// Set of presences in one word: up to two inline, or a pointer to bit planes, one plane for each slot.
//   0                                          empty
//   ...second (30 bits)... | first (30) | 01   one presence, or two where `second` is not 0
//   address | 10                               Planes
class Presence {
public:
    struct Planes {
        u16 count, words;  // number of planes; 64-bit words of each
        u32 capacity;      // number of allocated planes
        u64* plane(u32 i) { return reinterpret_cast<u64*>(this + 1) + std::size_t{i} * (words + 1u); }  // [slot, bits...]
    };

    bool empty() const { return word_ == 0; }
    bool is_planes() const { return (word_ & 3) == 2; }
    Planes* planes() const { return reinterpret_cast<Planes*>(word_ & ~u64{3}); }

    bool test(Seat seat, u32 slot) const {
        if (is_planes()) {
            Planes* all = planes();
            for (u32 i = 0; i < all->count; ++i) {
                const u64* plane = all->plane(i);
                if (plane[0] == slot) return seat / 64 < all->words && (plane[1 + seat / 64] >> (seat % 64) & 1);
            }
            return false;
        }
        const u64 wanted = pack(seat, slot);
        return word_ != 0 && (first() == wanted || second() == wanted);
    }

    // Add a presence; returns false where it is in the set. `bytes` counts the heap memory of all sets.
    bool add(Seat seat, u32 slot, std::size_t& bytes) {
        if (test(seat, slot)) return false;
        if (word_ == 0) {
            word_ = pack(seat, slot) << 2 | 1;
            return true;
        }
        if (!is_planes()) {
            if (second() == 0) {
                word_ |= pack(seat, slot) << 32;
                return true;
            }
            const u64 held[2] = {first(), second()};
            word_ = 0;
            Planes* all = allocate(1, words_for(std::max({seat, seat_of(held[0]), seat_of(held[1])})), bytes);
            word_ = reinterpret_cast<u64>(all) | 2;
            for (u64 packed : held) set(seat_of(packed), slot_of(packed), bytes);
        }
        set(seat, slot, bytes);
        return true;
    }

    // Remove a presence; returns false where it is not in the set.
    bool remove(Seat seat, u32 slot, std::size_t& bytes) {
        if (!test(seat, slot)) return false;
        if (!is_planes()) {
            const u64 kept = first() == pack(seat, slot) ? second() : first();
            word_ = kept == 0 ? 0 : kept << 2 | 1;
            return true;
        }
        Planes* all = planes();
        for (u32 i = 0; i < all->count; ++i) {
            u64* plane = all->plane(i);
            if (plane[0] != slot) continue;
            plane[1 + seat / 64] &= ~(u64{1} << (seat % 64));
            u64 any = 0;
            for (u32 word = 0; word < all->words; ++word) any |= plane[1 + word];
            if (any == 0) {
                --all->count;
                std::memmove(plane, all->plane(all->count), (all->words + 1u) * sizeof(u64));
            }
            break;
        }
        if (all->count == 0) drop(bytes);
        return true;
    }

    void drop(std::size_t& bytes) {
        if (is_planes()) {
            bytes -= bytes_of(planes()->capacity, planes()->words);
            std::free(planes());
        }
        word_ = 0;
    }

    // Call visit(slot, word index, bits) for each slot; inline presences come as single bits.
    template <class Visit>
    void each(Visit visit) const {
        if (is_planes()) {
            Planes* all = planes();
            for (u32 i = 0; i < all->count; ++i) {
                const u64* plane = all->plane(i);
                for (u32 word = 0; word < all->words; ++word) {
                    if (plane[1 + word] != 0) visit(static_cast<u32>(plane[0]), word, plane[1 + word]);
                }
            }
        } else if (word_ != 0) {
            for (u64 packed : {first(), second()}) {
                if (packed != 0) visit(slot_of(packed), seat_of(packed) / 64, u64{1} << (seat_of(packed) % 64));
            }
        }
    }

private:
    // Return seat + 1 in 22 bits and the slot in 8 bits, which is never 0.
    static u64 pack(Seat seat, u32 slot) { return u64{seat + 1} << 8 | slot; }
    static Seat seat_of(u64 packed) { return static_cast<Seat>((packed >> 8) - 1); }
    static u32 slot_of(u64 packed) { return packed & 255; }
    static u32 words_for(Seat seat) { return seat / 64 + 1; }
    static std::size_t bytes_of(u32 planes, u32 words) { return sizeof(Planes) + planes * (words + 1u) * sizeof(u64); }
    u64 first() const { return word_ >> 2 & ((u64{1} << 30) - 1); }
    u64 second() const { return word_ >> 32; }

    static Planes* allocate(u32 planes, u32 words, std::size_t& bytes) {
        void* memory = std::calloc(1, bytes_of(planes, words));
        if (memory == nullptr) throw std::bad_alloc();
        bytes += bytes_of(planes, words);
        return new (memory) Planes{0, static_cast<u16>(words), planes};
    }

    void set(Seat seat, u32 slot, std::size_t& bytes) {
        Planes* all = planes();
        u32 at = 0;
        while (at < all->count && all->plane(at)[0] != slot) ++at;
        if (words_for(seat) > all->words || at == all->capacity) {
            Planes* fresh = allocate(std::max<u32>(at + 1, all->count), std::max<u32>(words_for(seat), all->words), bytes);
            for (u32 i = 0; i < all->count; ++i) {
                std::memcpy(fresh->plane(i), all->plane(i), (all->words + 1u) * sizeof(u64));
            }
            fresh->count = all->count;
            drop(bytes);
            word_ = reinterpret_cast<u64>(fresh) | 2;
            all = fresh;
        }
        u64* plane = all->plane(at);
        if (at == all->count) {
            std::memset(plane, 0, (all->words + 1u) * sizeof(u64));
            plane[0] = slot;
            ++all->count;
        }
        plane[1 + seat / 64] |= u64{1} << (seat % 64);
    }

    u64 word_ = 0;
};

struct Node {
    u64 key;  // digest of the prefix that the block completes
    Presence presence;
    u32 end;     // length of that prefix in tokens
    u32 length;  // tokens in the block
};

class Nodes {
public:
    explicit Nodes(Pages& pages) : table_(pages) {}
    ~Nodes() {
        table_.each([&](const Entry& entry) { pool_[entry.id].presence.drop(heap_); });
    }

    Node& operator[](u32 id) { return pool_[id]; }
    const Node& operator[](u32 id) const { return pool_[id]; }

    static u32 hash(u64 key, u32 length) {
        return static_cast<u32>(keyed(key + u64{length} * 0xD6E8FEB86659FD93ull) >> 32);
    }

    void prefetch(u32 hash) const { table_.prefetch(hash); }

    // Return the node of a block, or 0 where no holder has it.
    u32 find(u64 key, u32 length) const {
        const u32 hashed = hash(key, length);
        const Entry* entry = table_.find(hashed, [&](const Entry& it) {
            return it.hash == hashed && pool_[it.id].key == key && pool_[it.id].length == length;
        });
        return entry == nullptr ? 0 : entry->id;
    }

    // Return the node of a block as `find` does. Nodes of one run are neighbours, so the node after `before` is tried first,
    // which is much cheaper than a search.
    u32 find_after(u32 before, u64 key, u32 length) const {
        if (before != 0 && pool_.holds(before + 1)) {
            const Node& next = pool_[before + 1];
            if (next.key == key && next.length == length) return before + 1;
        }
        return find(key, length);
    }

    // Return the node of a block; a new one needs a presence at once.
    u32 find_or_create(u64 key, u32 end, u32 length) {
        u32 id = find(key, length);
        if (id == 0) {
            id = pool_.allocate();
            pool_[id] = Node{key, Presence(), end, length};
            table_.insert(Entry{id, hash(key, length)});
        }
        return id;
    }

    // Add a presence; returns whether it is the first of its kind.
    bool add(u32 id, Seat seat, u32 slot) {
        const bool is_first = pool_[id].presence.add(seat, slot, heap_);
        if (!is_first) ++extra_copies_[copies_key(id, seat, slot)];
        return is_first;
    }

    // Remove a presence, and the node with its last one; returns whether the presence was the last of its kind.
    bool remove(u32 id, Seat seat, u32 slot) {
        if (!extra_copies_.empty()) {
            const auto copies = extra_copies_.find(copies_key(id, seat, slot));
            if (copies != extra_copies_.end()) {
                if (--copies->second == 0) extra_copies_.erase(copies);
                return false;
            }
        }
        Node& node = pool_[id];
        node.presence.remove(seat, slot, heap_);
        if (!node.presence.empty()) return true;
        const u32 h = hash(node.key, node.length);
        table_.erase(table_.find(h, [&](const Entry& it) { return it.id == id; }));
        node.length = 0;  // marks a freed node
        pool_.free(id);
        return true;
    }

    std::size_t bytes() const { return pool_.bytes() + table_.bytes() + heap_ + extra_copies_.size() * 64; }
    std::size_t size() const { return table_.size(); }

private:
    struct Entry {
        u32 id, hash;
    };
    struct Traits {
        static u32 hash(const Entry& entry) { return entry.hash; }
    };
    struct CopiesHash {
        std::size_t operator()(const std::pair<u64, u32>& key) const {
            return keyed(key.first + key.second * 0xD6E8FEB86659FD93ull);
        }
    };
    static std::pair<u64, u32> copies_key(u32 id, Seat seat, u32 slot) { return {u64{id} << 32 | seat, slot}; }

    using Table = SegmentedTable<Entry, Traits>;

    Pool<Node> pool_;
    Table table_;
    std::unordered_map<std::pair<u64, u32>, u32, CopiesHash> extra_copies_;  // presence -> number of additions after the first
    std::size_t heap_ = 0;
};

// -- removed blocks -------------------------------------------------------------------------------------------------------

// Blocks that holders lost lately, with the time, so that evicted prefixes can be told from unknown ones. At most
// kRemovedBlocksMax entries; on a hash collision the older one is overwritten. They are hints for explanations only.
constexpr std::size_t kRemovedBlocksMax = std::size_t{1} << 18;

// Part [start, end) of a prompt that a holder lost, and when it lost the first block.
struct RemovedPrefix {
    u64 end, holder;
    double at_s;
};

class RemovedBlocks {
public:
    double now_s = 0;  // time of the batch that is applied

    void record(u64 key, u64 holder) {
        // calloc: zero pages cost nothing before they are touched.
        if (!entries_) entries_.reset(static_cast<Entry*>(std::calloc(kRemovedBlocksMax, sizeof(Entry))));
        if (!entries_) return;
        Entry* pair = entries_.get() + place(key);
        Entry& entry = pair[0].key == key || (pair[1].key != key && pair[0].at_s <= pair[1].at_s) ? pair[0] : pair[1];
        entry = Entry{key, holder + 1, now_s};
    }

    // Return the entry of a prefix's key, or nothing.
    std::optional<RemovedPrefix> find(u64 key) const {
        if (!entries_) return std::nullopt;
        for (const Entry* entry = entries_.get() + place(key), *end = entry + 2; entry != end; ++entry) {
            if (entry->key == key && entry->by != 0) return RemovedPrefix{0, entry->by - 1, entry->at_s};
        }
        return std::nullopt;
    }

    std::size_t bytes() const { return entries_ ? kRemovedBlocksMax * sizeof(Entry) : 0; }

private:
    struct Entry {
        u64 key, by;  // `by`: holder + 1; 0: free entry
        double at_s;
    };
    struct Free {
        void operator()(Entry* entries) const { std::free(entries); }
    };
    static std::size_t place(u64 key) { return (keyed(key) >> 32) % (kRemovedBlocksMax / 2) * 2; }

    std::unique_ptr<Entry[], Free> entries_;
};

}  // namespace blockcast
