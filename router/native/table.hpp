// A hash table that grows without a pause, and a pool whose items never move. Sources: extendible hashing (Fagin et
// al., 1979) with small linearly probed segments, as in CCEH (Nam et al., FAST 2019); backward-shift deletion.
//
// A directory of 2^depth pointers is indexed by the top bits of a 32-bit hash. A segment that fills grows by a quarter
// until it has kSegmentMax slots, then splits in two: the most work one insertion can cause is to move kSegmentMax
// entries, plus, once per doubling of the table, to copy the directory (8 bytes for some 400 entries).
//
// Invariants: a segment of local depth d owns 2^(depth - d) neighbouring directory entries; at least one slot in eight is
// empty, so every probe ends; an entry stands between its home slot and the first empty slot after it.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "digest.hpp"

namespace blockcast {

// Traits: static bool empty(const Entry&); u32 hash(const Entry&) const. Entry is trivially copyable; zero bytes = empty.
template <class Entry, class Traits>
class SegmentedTable {
    struct Segment {
        u32 depth, count, capacity, unused;
        Entry* slots() { return reinterpret_cast<Entry*>(this + 1); }
    };

public:
    explicit SegmentedTable(Traits traits = Traits()) : traits_(traits) {}
    SegmentedTable(SegmentedTable&& other) noexcept { swap(other); }
    SegmentedTable& operator=(SegmentedTable&& other) noexcept {
        SegmentedTable gone(std::move(*this));
        swap(other);
        return *this;
    }
    ~SegmentedTable() {
        while (Segment* segment = pop_segment()) release(segment);
    }

    std::size_t size() const { return size_; }
    std::size_t bytes() const { return bytes_ + directory_.capacity() * sizeof(Segment*); }

    // Two steps, some work apart: the segment's head, then the slot where a search would begin.
    void prefetch_segment(u32 hash) const {
        if (!directory_.empty()) __builtin_prefetch(directory_[index(hash)]);
    }
    void prefetch_slot(u32 hash) const {
        if (directory_.empty()) return;
        Segment* segment = directory_[index(hash)];
        __builtin_prefetch(segment->slots() + home(hash, segment->capacity));
    }

    template <class Equal>
    Entry* find(u32 hash, Equal equal) const {
        if (directory_.empty()) return nullptr;
        Segment* segment = directory_[index(hash)];
        Entry* slots = segment->slots();
        for (u32 at = home(hash, segment->capacity);;) {
            if (Traits::empty(slots[at])) return nullptr;
            if (equal(slots[at])) return &slots[at];
            if (++at == segment->capacity) at = 0;
        }
    }

    // Adds an entry that is not there yet. Pointers into the table are invalid afterwards.
    void insert(const Entry& entry) {
        const u32 hash = traits_.hash(entry);
        if (directory_.empty()) directory_.push_back(allocate(0, kSegmentMin));
        Segment* segment = directory_[index(hash)];
        while ((segment->count + 1) * 8 > segment->capacity * 7) {
            if (segment->capacity < kSegmentMax || segment->depth >= kDepthMax) {
                resize(segment, segment->capacity + segment->capacity / 4 + 4);
            } else {
                split(segment);
            }
            segment = directory_[index(hash)];
        }
        place(segment, entry);
        ++size_;
    }

    // Removes an entry that `find` returned. Pointers into the table are invalid afterwards.
    void erase(Entry* entry) {
        Segment* segment = directory_[index(traits_.hash(*entry))];
        Entry* slots = segment->slots();
        u32 hole = static_cast<u32>(entry - slots);
        for (u32 at = hole;;) {
            if (++at == segment->capacity) at = 0;
            if (Traits::empty(slots[at])) break;
            const u32 wants = home(traits_.hash(slots[at]), segment->capacity);
            const bool stays = hole <= at ? (hole < wants && wants <= at) : (hole < wants || wants <= at);
            if (stays) continue;
            slots[hole] = slots[at];
            hole = at;
        }
        std::memset(static_cast<void*>(&slots[hole]), 0, sizeof(Entry));
        --segment->count;
        --size_;
        if (segment->capacity > 4 * kSegmentMin && segment->count * 4 < segment->capacity) {
            resize(segment, segment->count + segment->count / 2 + kSegmentMin);
        }
    }

    template <class Visit>
    void each(Visit visit) const {
        for (std::size_t at = 0; at < directory_.size();) {
            Segment* segment = directory_[at];
            visit_segment(segment, visit);
            at += std::size_t{1} << (depth_ - segment->depth);
        }
    }

    // Hands out and forgets up to one segment's entries; false when nothing is left. The table only shrinks from here:
    // no find, insert or erase after the first call.
    template <class Visit>
    bool drain_some(Visit visit) {
        Segment* segment = pop_segment();
        if (segment == nullptr) return false;
        visit_segment(segment, visit);
        size_ -= segment->count;
        release(segment);
        return true;
    }

private:
    static constexpr u32 kSegmentMin = 8, kSegmentMax = 480, kDepthMax = 24;

    void swap(SegmentedTable& other) {
        std::swap(traits_, other.traits_);
        std::swap(directory_, other.directory_);
        std::swap(depth_, other.depth_);
        std::swap(size_, other.size_);
        std::swap(bytes_, other.bytes_);
    }

    std::size_t index(u32 hash) const { return depth_ == 0 ? 0 : hash >> (32 - depth_); }
    static u32 home(u32 hash, u32 capacity) { return static_cast<u32>((u64{hash * 0x9E3779B1u} * capacity) >> 32); }

    template <class Visit>
    static void visit_segment(Segment* segment, Visit& visit) {
        for (u32 i = 0; i < segment->capacity; ++i) {
            if (!Traits::empty(segment->slots()[i])) visit(segment->slots()[i]);
        }
    }

    static std::size_t bytes_of(u32 capacity) { return sizeof(Segment) + capacity * sizeof(Entry); }

    Segment* allocate(u32 depth, u32 capacity) {
        void* memory = std::calloc(1, bytes_of(capacity));
        if (memory == nullptr) throw std::bad_alloc();
        bytes_ += bytes_of(capacity);
        return new (memory) Segment{depth, 0, capacity, 0};
    }

    void release(Segment* segment) {
        bytes_ -= bytes_of(segment->capacity);
        std::free(segment);
    }

    Segment* pop_segment() {
        if (directory_.empty()) return nullptr;
        Segment* segment = directory_.back();
        while (!directory_.empty() && directory_.back() == segment) directory_.pop_back();
        return segment;
    }

    void place(Segment* segment, const Entry& entry) {
        Entry* slots = segment->slots();
        u32 at = home(traits_.hash(entry), segment->capacity);
        while (!Traits::empty(slots[at])) {
            if (++at == segment->capacity) at = 0;
        }
        slots[at] = entry;
        ++segment->count;
    }

    // Points the directory entries of `old` to `fresh`.
    void redirect(Segment* old, Segment* fresh, u32 any_hash) {
        const std::size_t span = std::size_t{1} << (depth_ - old->depth);
        const std::size_t first = index(any_hash) / span * span;
        for (std::size_t i = 0; i < span; ++i) directory_[first + i] = fresh;
    }

    void resize(Segment* segment, u32 capacity) {
        Segment* fresh = allocate(segment->depth, capacity);
        u32 any_hash = 0;
        auto move = [&](Entry& entry) {
            any_hash = traits_.hash(entry);
            place(fresh, entry);
        };
        visit_segment(segment, move);
        if (fresh->count == 0) {  // nothing tells where it stands: look for it
            for (Segment*& entry : directory_) {
                if (entry == segment) entry = fresh;
            }
        } else {
            redirect(segment, fresh, any_hash);
        }
        release(segment);
    }

    void split(Segment* segment) {
        if (segment->depth == depth_) {
            std::vector<Segment*> doubled(directory_.size() * 2);
            for (std::size_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
            directory_.swap(doubled);
            ++depth_;
        }
        const u32 bit = 31 - segment->depth;
        Segment* halves[2];
        for (Segment*& half : halves) half = allocate(segment->depth + 1, segment->capacity / 2 + segment->capacity / 8);
        u32 any_hash = 0;
        auto move = [&](Entry& entry) {
            any_hash = traits_.hash(entry);
            const u32 side = (any_hash >> bit) & 1;
            while ((halves[side]->count + 1) * 8 > halves[side]->capacity * 7) grow_detached(halves[side]);
            place(halves[side], entry);
        };
        visit_segment(segment, move);
        const std::size_t span = std::size_t{1} << (depth_ - segment->depth);
        const std::size_t first = index(any_hash) / span * span;
        for (std::size_t i = 0; i < span; ++i) directory_[first + i] = halves[i >= span / 2];
        release(segment);
    }

    void grow_detached(Segment*& segment) {
        Segment* fresh = allocate(segment->depth, segment->capacity + segment->capacity / 4 + 4);
        auto move = [&](Entry& entry) { place(fresh, entry); };
        visit_segment(segment, move);
        release(segment);
        segment = fresh;
    }

    Traits traits_;
    std::vector<Segment*> directory_;
    u32 depth_ = 0;
    std::size_t size_ = 0, bytes_ = 0;
};

// Items by a 32-bit id that starts at 1 (0 = none). Chunks never move, so growing costs one small allocation. Items are
// trivially copyable and at least 4 bytes; a freed one holds the id of the next freed one.
template <class Item>
class Pool {
public:
    Pool() = default;
    Pool(Pool&& other) noexcept { swap(other); }
    Pool& operator=(Pool&& other) noexcept {
        Pool gone(std::move(*this));
        swap(other);
        return *this;
    }

    Item& operator[](u32 id) { return chunks_[id / kChunk][id % kChunk]; }
    const Item& operator[](u32 id) const { return chunks_[id / kChunk][id % kChunk]; }
    void prefetch(u32 id) const { __builtin_prefetch(&chunks_[id / kChunk][id % kChunk]); }

    u32 allocate() {
        if (free_ != 0) {
            const u32 id = free_;
            std::memcpy(&free_, &(*this)[id], sizeof free_);
            return id;
        }
        if (next_ / kChunk == chunks_.size()) chunks_.emplace_back(new Item[kChunk]);
        return next_++;
    }

    void free(u32 id) {
        std::memcpy(static_cast<void*>(&(*this)[id]), &free_, sizeof free_);
        free_ = id;
    }

    std::size_t bytes() const { return chunks_.size() * kChunk * sizeof(Item); }

private:
    void swap(Pool& other) {
        std::swap(chunks_, other.chunks_);
        std::swap(free_, other.free_);
        std::swap(next_, other.next_);
    }

    static constexpr u32 kChunk = 4096;
    std::vector<std::unique_ptr<Item[]>> chunks_;
    u32 free_ = 0, next_ = 1;
};

}  // namespace blockcast
