// A hash table that grows without a pause, and a pool whose items never move. Sources: extendible hashing (Fagin et
// al., 1979) over small segments, as in CCEH (Nam et al., FAST 2019); chunks of slots with a tag byte each and a count of
// what overflowed them, as in F14 (Bronson and Shi, 2019), so that deleting leaves no tombstones.
//
// A directory of 2^depth segment numbers is indexed by the top bits of a 32-bit hash. A segment that fills grows by a
// page until it has kPagesMax of them, then splits in two: the most work one insertion can cause is to move the 500 or
// 1,000 entries of a segment, plus, once per doubling of the table, to copy the directory (4 bytes for as many entries).
// So between 2/3 and 9/10 of the slots are in use, 4/5 on average.
// All segments of all tables are made of pages of one size, so what one gives back fits the next: no fragmentation.
//
// Invariants: a segment of local depth d owns 2^(depth - d) neighbouring directory entries; at most 29 of 32 slots of
// a segment are taken; an entry stands in the first chunk from its home on that had room when it came, and every chunk
// that it passed counts it in `overflow` (saturating at 255, where it stays until the segment is rebuilt).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "digest.hpp"

namespace blockcast {

// Pages of 2 KiB by number, cut from slabs of 2 MiB. What is given back is kept for the next who asks.
class Pages {
public:
    static constexpr std::size_t kBytes = 2048;

    Pages() = default;
    Pages(const Pages&) = delete;
    ~Pages() {
        for (u8* slab : slabs_) std::free(slab);
    }

    u8* at(u32 page) const { return slabs_[page / kPerSlab] + page % kPerSlab * kBytes; }

    u32 take() {
        if (!free_.empty()) {
            const u32 page = free_.back();
            free_.pop_back();
            return page;
        }
        if (next_ == slabs_.size() * kPerSlab) {
            u8* slab = static_cast<u8*>(std::aligned_alloc(4096, kPerSlab * kBytes));
            if (slab == nullptr) throw std::bad_alloc();
            slabs_.push_back(slab);
        }
        return next_++;
    }

    void give_back(u32 page) { free_.push_back(page); }
    std::size_t bytes() const { return std::size_t{next_} * kBytes + free_.capacity() * sizeof(u32); }

private:
    static constexpr u32 kPerSlab = 1024;
    std::vector<u8*> slabs_;
    std::vector<u32> free_;
    u32 next_ = 0;
};

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
    static constexpr u32 kPerPage = Pages::kBytes / sizeof(Chunk), kPagesMax = 5, kDepthMax = 24;

    struct Segment {
        u16 size;  // chunks
        u16 depth;
        u32 count;
        u32 pages[kPagesMax];
    };

public:
    explicit SegmentedTable(Pages& pages) : pages_(&pages) {}
    SegmentedTable(SegmentedTable&& other) noexcept : pages_(other.pages_) { swap(other); }
    SegmentedTable& operator=(SegmentedTable&& other) noexcept {
        SegmentedTable gone(std::move(*this));
        swap(other);
        return *this;
    }
    ~SegmentedTable() {
        for (const Segment& segment : segments_) release(segment);
    }

    std::size_t size() const { return size_; }
    // Without its pages: those are counted where they are kept.
    std::size_t bytes() const {
        return directory_.capacity() * sizeof(u32) + segments_.capacity() * sizeof(Segment);
    }

    // The chunk where a search would begin.
    void prefetch(u32 hash) const {
        if (directory_.empty()) return;
        const Segment& segment = segments_[directory_[index(hash)]];
        __builtin_prefetch(chunk_of(segment, home(scramble(hash), segment.size)));
    }

    template <class Equal>
    Entry* find(u32 hash, Equal equal) const {
        if (directory_.empty()) return nullptr;
        const Segment& segment = segments_[directory_[index(hash)]];
        const u32 scrambled = scramble(hash);
        for (u32 at = home(scrambled, segment.size), tried = 0; tried < segment.size; ++tried) {
            Chunk& chunk = *chunk_of(segment, at);
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
            segments_.push_back(allocate(0, 1));  // one page
            directory_.push_back(0);
        }
        u32 number = directory_[index(hash)];
        while (is_full(segments_[number])) {
            const u32 pages = segments_[number].size / kPerPage;
            pages < kPagesMax ? resize(segments_[number], pages + 1) : split(number, hash);
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
        Chunk* chunk = chunk_of(segment, at);
        while (entry < chunk->slots || entry >= chunk->slots + kSlots) {
            if (chunk->overflow != 255) --chunk->overflow;
            at = at + 1 == segment.size ? 0 : at + 1;
            chunk = chunk_of(segment, at);
        }
        chunk->tags[entry - chunk->slots] = 0;
        --segment.count;
        --size_;
        const u32 needed = segment.count * 4 / (3 * kSlots * kPerPage) + 1;
        if (needed * 2 < segment.size / kPerPage) resize(segment, needed);
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
    void swap(SegmentedTable& other) {
        std::swap(pages_, other.pages_);
        std::swap(directory_, other.directory_);
        std::swap(segments_, other.segments_);
        std::swap(depth_, other.depth_);
        std::swap(size_, other.size_);
    }

    Chunk* chunk_of(const Segment& segment, u32 at) const {
        return reinterpret_cast<Chunk*>(pages_->at(segment.pages[at / kPerPage])) + at % kPerPage;
    }
    std::size_t index(u32 hash) const { return depth_ == 0 ? 0 : hash >> (32 - depth_); }
    static u32 scramble(u32 hash) { return hash * 0x9E3779B1u; }
    static u32 home(u32 scrambled, u32 size) { return static_cast<u32>((u64{scrambled} * size) >> 32); }
    static u8 tag_of(u32 scrambled) { return static_cast<u8>(scrambled | 128); }
    static bool is_full(const Segment& segment) { return (segment.count + 1) * 32 > segment.size * kSlots * 29; }

    template <class Visit>
    void visit_segment(const Segment& segment, Visit& visit) const {
        for (u32 i = 0; i < segment.size; ++i) {
            Chunk* chunk = chunk_of(segment, i);
            for (u32 taken = ~chunk->with_tag(0) & ((1u << kSlots) - 1); taken != 0; taken &= taken - 1) {
                visit(chunk->slots[__builtin_ctz(taken)]);
            }
        }
    }

    Segment allocate(u32 depth, u32 pages) {
        Segment segment{static_cast<u16>(pages * kPerPage), static_cast<u16>(depth), 0, {}};
        for (u32 i = 0; i < pages; ++i) segment.pages[i] = pages_->take();
        for (u32 i = 0; i < segment.size; ++i) std::memset(chunk_of(segment, i)->tags, 0, 16);
        return segment;
    }

    void release(const Segment& segment) {
        for (u32 i = 0; i < segment.size / kPerPage; ++i) pages_->give_back(segment.pages[i]);
    }

    void place(Segment& segment, const Entry& entry, u32 hash) {
        const u32 scrambled = scramble(hash);
        u32 at = home(scrambled, segment.size);
        Chunk* chunk = chunk_of(segment, at);
        u32 room = chunk->with_tag(0);
        while (room == 0) {
            if (chunk->overflow != 255) ++chunk->overflow;
            if (++at == segment.size) at = 0;
            chunk = chunk_of(segment, at);
            room = chunk->with_tag(0);
        }
        const u32 slot = static_cast<u32>(__builtin_ctz(room));
        chunk->tags[slot] = tag_of(scrambled);
        chunk->slots[slot] = entry;
        ++segment.count;
    }

    void resize(Segment& segment, u32 pages) {
        Segment fresh = allocate(segment.depth, pages);
        auto move = [&](const Entry& entry) { place(fresh, entry, Traits::hash(entry)); };
        visit_segment(segment, move);
        release(segment);
        segment = fresh;
    }

    void split(u32 number, u32 any_hash) {
        if (segments_[number].depth == kDepthMax) throw std::length_error("the index is full: too many names");
        if (segments_[number].depth == depth_) {
            std::vector<u32> doubled(directory_.size() * 2);
            for (std::size_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
            directory_.swap(doubled);
            ++depth_;
        }
        Segment old = segments_[number];
        Segment halves[2];
        for (Segment& half : halves) half = allocate(old.depth + 1u, (kPagesMax + 1) / 2);
        auto move = [&](const Entry& entry) {
            const u32 hash = Traits::hash(entry);
            Segment& half = halves[hash >> (31 - old.depth) & 1];
            if (is_full(half)) resize(half, half.size / kPerPage + 1);
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

    Pages* pages_;
    std::vector<u32> directory_;
    std::vector<Segment> segments_;
    u32 depth_ = 0;
    std::size_t size_ = 0;
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
