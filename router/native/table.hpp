// A hash table that grows without a pause, and a pool whose items never move. Sources: extendible hashing (Fagin et
// al., 1979) over small segments, as in CCEH (Nam et al., FAST 2019); chunks of slots with a tag byte each and a count of
// what overflowed them, as in F14 (Bronson and Shi, 2019), so that deleting leaves no tombstones.
//
// A directory of 2^depth segment numbers is indexed by the top bits of a 32-bit hash. A segment that fills grows by a
// quarter until it has kChunksMax chunks, then splits in two: the most work one insertion can cause is to move the some
// 500 entries of a segment, plus, once per doubling of the table, to copy the directory (4 bytes for some 400 entries).
//
// Invariants: a segment of local depth d owns 2^(depth - d) neighbouring directory entries; at most 7 of 8 slots of a segment
// are taken; an entry stands in the first chunk from its home on that had room when it came, and every chunk that it passed counts it
// in `overflow` (saturating at 255, where it stays until the segment is rebuilt).
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "digest.hpp"

namespace blockcast {

// Traits: static u32 hash(const Entry&). Entry is trivially copyable, of 8 or 16 bytes.
template <class Entry, class Traits>
class SegmentedTable {
    static_assert(sizeof(Entry) == 8 || sizeof(Entry) == 16);
    static constexpr u32 kSlots = sizeof(Entry) == 8 ? 14 : 15;

    // Two or four cache lines. A tag is 0 for a free slot, else 128 + 7 bits of the hash.
    struct alignas(64) Chunk {
        u8 tags[15];  // the last one is not used where there are 14 slots
        u8 overflow;
        Entry slots[kSlots];

        u32 with_tag(u8 tag) const {
#if defined(__SSE2__)
            const __m128i all = _mm_load_si128(reinterpret_cast<const __m128i*>(tags));
            const int equal = _mm_movemask_epi8(_mm_cmpeq_epi8(all, _mm_set1_epi8(static_cast<char>(tag))));
            return static_cast<u32>(equal) & ((1u << kSlots) - 1);
#else
            u32 equal = 0;
            for (u32 i = 0; i < kSlots; ++i) equal |= u32{tags[i] == tag} << i;
            return equal;
#endif
        }
    };
    static_assert(sizeof(Chunk) == (sizeof(Entry) == 8 ? 128 : 256));

    struct Segment {
        Chunk* chunks;
        u32 count;
        u16 size;  // chunks
        u16 depth;
    };

public:
    SegmentedTable() = default;
    SegmentedTable(SegmentedTable&& other) noexcept { swap(other); }
    SegmentedTable& operator=(SegmentedTable&& other) noexcept {
        SegmentedTable gone(std::move(*this));
        swap(other);
        return *this;
    }
    ~SegmentedTable() {
        for (Segment& segment : segments_) release(segment);
    }

    std::size_t size() const { return size_; }
    std::size_t bytes() const {
        return bytes_ + directory_.capacity() * sizeof(u32) + segments_.capacity() * sizeof(Segment);
    }

    // The chunk where a search would begin.
    void prefetch(u32 hash) const {
        if (directory_.empty()) return;
        const Segment& segment = segments_[directory_[index(hash)]];
        __builtin_prefetch(&segment.chunks[home(scramble(hash), segment.size)]);
    }

    template <class Equal>
    Entry* find(u32 hash, Equal equal) const {
        if (directory_.empty()) return nullptr;
        const Segment& segment = segments_[directory_[index(hash)]];
        const u32 scrambled = scramble(hash);
        for (u32 at = home(scrambled, segment.size), tried = 0; tried < segment.size; ++tried) {
            Chunk& chunk = segment.chunks[at];
            for (u32 hits = chunk.with_tag(tag_of(scrambled)); hits != 0; hits &= hits - 1) {
                Entry* entry = &chunk.slots[__builtin_ctz(hits)];
                if (equal(*entry)) return entry;
            }
            if (chunk.overflow == 0) return nullptr;
            if (++at == segment.size) at = 0;
        }
        return nullptr;
    }

    // Adds an entry that is not there yet. Pointers into the table are invalid afterwards.
    void insert(const Entry& entry) {
        const u32 hash = Traits::hash(entry);
        if (directory_.empty()) {
            segments_.push_back(allocate(0, 1));
            directory_.push_back(0);
        }
        u32 number = directory_[index(hash)];
        while (is_full(segments_[number])) {
            if (segments_[number].size < kChunksMax || segments_[number].depth >= kDepthMax) {
                resize(segments_[number], segments_[number].size + segments_[number].size / 4u + 1);
            } else {
                split(number, hash);
            }
            number = directory_[index(hash)];
        }
        place(segments_[number], entry, hash);
        ++size_;
    }

    // Removes an entry that `find` returned. Pointers into the table are invalid afterwards.
    void erase(Entry* entry) {
        const u32 hash = Traits::hash(*entry);
        Segment& segment = segments_[directory_[index(hash)]];
        u32 at = home(scramble(hash), segment.size);
        const u32 stands = static_cast<u32>(
            (reinterpret_cast<const char*>(entry) - reinterpret_cast<const char*>(segment.chunks)) / sizeof(Chunk));
        for (; at != stands; at = at + 1 == segment.size ? 0 : at + 1) {
            if (segment.chunks[at].overflow != 255) --segment.chunks[at].overflow;
        }
        segment.chunks[at].tags[entry - segment.chunks[at].slots] = 0;
        --segment.count;
        --size_;
        const u32 needed = segment.count * 4 / (3 * kSlots) + 1;
        if (segment.size > 4 && needed * 2 < segment.size) resize(segment, needed);
    }

    template <class Visit>
    void each(Visit visit) const {
        for (const Segment& segment : segments_) visit_segment(segment, visit);  // may change entries, but not their hash
    }

    // Hands out and forgets up to one segment's entries; false when nothing is left. The table only shrinks from here:
    // no find, insert or erase after the first call.
    template <class Visit>
    bool drain_some(Visit visit) {
        directory_.clear();
        if (segments_.empty()) return false;
        visit_segment(segments_.back(), visit);
        size_ -= segments_.back().count;
        release(segments_.back());
        segments_.pop_back();
        return true;
    }

private:
    static constexpr u32 kChunksMax = 32, kDepthMax = 24;

    void swap(SegmentedTable& other) {
        std::swap(directory_, other.directory_);
        std::swap(segments_, other.segments_);
        std::swap(depth_, other.depth_);
        std::swap(size_, other.size_);
        std::swap(bytes_, other.bytes_);
    }

    std::size_t index(u32 hash) const { return depth_ == 0 ? 0 : hash >> (32 - depth_); }
    static u32 scramble(u32 hash) { return hash * 0x9E3779B1u; }
    static u32 home(u32 scrambled, u32 size) { return static_cast<u32>((u64{scrambled} * size) >> 32); }
    static u8 tag_of(u32 scrambled) { return static_cast<u8>(scrambled | 128); }
    static bool is_full(const Segment& segment) { return (segment.count + 1) * 8 > segment.size * kSlots * 7; }

    template <class Visit>
    static void visit_segment(const Segment& segment, Visit& visit) {
        for (u32 i = 0; i < segment.size; ++i) {
            for (u32 slot = 0; slot < kSlots; ++slot) {
                if (segment.chunks[i].tags[slot] != 0) visit(segment.chunks[i].slots[slot]);
            }
        }
    }

    Segment allocate(u32 depth, u32 size) {
        void* memory = std::aligned_alloc(64, size * sizeof(Chunk));
        if (memory == nullptr) throw std::bad_alloc();
        bytes_ += size * sizeof(Chunk);
        Chunk* chunks = static_cast<Chunk*>(memory);
        for (u32 i = 0; i < size; ++i) std::memset(chunks[i].tags, 0, 16);
        return Segment{chunks, 0, static_cast<u16>(size), static_cast<u16>(depth)};
    }

    void release(Segment& segment) {
        bytes_ -= segment.size * sizeof(Chunk);
        std::free(segment.chunks);
        segment.chunks = nullptr;
    }

    static void place(Segment& segment, const Entry& entry, u32 hash) {
        const u32 scrambled = scramble(hash);
        u32 at = home(scrambled, segment.size);
        u32 room = segment.chunks[at].with_tag(0);
        while (room == 0) {
            if (segment.chunks[at].overflow != 255) ++segment.chunks[at].overflow;
            if (++at == segment.size) at = 0;
            room = segment.chunks[at].with_tag(0);
        }
        const u32 slot = static_cast<u32>(__builtin_ctz(room));
        segment.chunks[at].tags[slot] = tag_of(scrambled);
        segment.chunks[at].slots[slot] = entry;
        ++segment.count;
    }

    void resize(Segment& segment, u32 size) {
        Segment fresh = allocate(segment.depth, size);
        auto move = [&](const Entry& entry) { place(fresh, entry, Traits::hash(entry)); };
        visit_segment(segment, move);
        release(segment);
        segment = fresh;
    }

    void split(u32 number, u32 any_hash) {
        if (segments_[number].depth == depth_) {
            std::vector<u32> doubled(directory_.size() * 2);
            for (std::size_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
            directory_.swap(doubled);
            ++depth_;
        }
        Segment old = segments_[number];
        Segment halves[2];
        for (Segment& half : halves) half = allocate(old.depth + 1u, old.size * 5u / 8u);
        auto move = [&](const Entry& entry) {
            const u32 hash = Traits::hash(entry);
            Segment& half = halves[hash >> (31 - old.depth) & 1];
            if (is_full(half)) resize(half, half.size + half.size / 4u + 1);
            place(half, entry, hash);
        };
        visit_segment(old, move);
        release(old);
        const u32 second = static_cast<u32>(segments_.size());
        segments_[number] = halves[0];
        segments_.push_back(halves[1]);
        const std::size_t span = std::size_t{1} << (depth_ - old.depth);
        const std::size_t first = index(any_hash) / span * span;
        for (std::size_t i = span / 2; i < span; ++i) directory_[first + i] = second;
    }

    std::vector<u32> directory_;
    std::vector<Segment> segments_;
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

    bool holds(u32 id) const { return id < next_; }

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
