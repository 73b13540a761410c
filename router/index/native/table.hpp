// A hash table that grows without a pause. Sources: extendible hashing (Fagin et al., 1979) over small segments, as in
// CCEH (Nam et al., FAST 2019); chunks of slots with a tag byte each and a count of what overflowed them, as in F14
// (Bronson and Shi, 2019), so that deleting leaves no tombstones.
//
// A directory of 2^depth segment numbers is indexed by the top bits of a 32-bit hash. A segment that fills grows from three
// pages to kPagesMax (a new table: by one page), then splits in two. So one insertion moves at most the 500 or 1,000 entries
// of a segment and, once per doubling of the table, copies the directory (4 bytes for as many entries). An entry moves three times
// in its life; between 1/2 and 9/10 of the slots are in use, 3/4 on average. All segments of all tables are made of
// pages of one size, so that freed pages fit every table and memory does not fragment.
//
// Invariants: a segment of local depth d owns 2^(depth - d) neighbouring directory entries; at most 29 of 32 slots of
// a segment are taken; an entry is in the first chunk, counted from its home, that had room at its insertion, and every
// chunk before that one counts the entry in `overflow` (saturating at 255 until the segment is rebuilt).
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "pages.hpp"

namespace blockcast {

// Hash a key that clients can choose (names, salts, digests of prompts). The key is multiplied by odd numbers that this process
// has drawn at random (Dietzfelbinger et al., 1997: two keys have the same top k bits with probability 2 / 2^k), so that no
// client can choose colliding keys. Two products are needed: one maps consecutive names to an arithmetic progression, which
// some factors concentrate on few slots.
inline u64 draw_secret() {
    std::random_device random;
    return u64{random()} << 32 | random() | 1;
}
inline const u64 secrets[2] = {draw_secret(), draw_secret()};
inline u64 keyed(u64 key) {
    key *= secrets[0];
    return (key ^ key >> 32) * secrets[1];
}

// Steps of searches beyond the first few for each byte of input, which an attack would increase; for tests.
inline thread_local u64 extra_work = 0;
[[gnu::noinline, gnu::cold]] inline void count_extra(std::size_t steps) { extra_work += steps; }

// Traits: static u32 hash(const Entry&). Entry is trivially copyable, of 8 or 16 bytes. 543 entries may have the same kDepthMax
// top bits of their hashes. Without the secret factors, more can only be made by chance. A name has one hash in all its slots,
// so three names with the same bits, each in most of the 256 slots, are enough. Half of all holders would have such names if
// their 2^24 entries were made for it.
template <class Entry, class Traits>
class SegmentedTable {
    static_assert(sizeof(Entry) == 8 || sizeof(Entry) == 16);
    static constexpr u32 kSlots = sizeof(Entry) == 8 ? 14 : 15;

    // Two or four cache lines. A tag is 0 for a free slot, else 8 bits of the hash (1 where they are 0).
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
        SegmentedTable old(std::move(*this));
        swap(other);
        return *this;
    }
    ~SegmentedTable() {
        for (const Segment& segment : segments_) release(segment);
    }

    std::size_t size() const { return size_; }
    // Return the table's memory without its pages, which Pages counts.
    std::size_t bytes() const {
        return directory_.capacity() * sizeof(u32) + segments_.capacity() * sizeof(Segment);
    }

    // Prefetch the chunk where a search begins.
    void prefetch(u32 hash) const {
        if (directory_.empty()) return;
        const Segment& segment = segments_[directory_[index(hash)]];
        __builtin_prefetch(chunk_of(segment, find_group(scramble(hash), segment.size)));
    }

    // Return the entry with this hash for which `equal` is true; null where there is none.
    template <class Equal>
    Entry* find(u32 hash, Equal equal) const {
        if (directory_.empty()) return nullptr;
        const Segment& segment = segments_[directory_[index(hash)]];
        const u32 scrambled = scramble(hash);
        const u8 tag = tag_of(scrambled);
        u32 at = find_group(scrambled, segment.size);
        for (u32 tried = 0; tried < segment.size; ++tried) {
            Chunk* chunk = chunk_of(segment, at);
            for (u32 hits = chunk->with_tag(tag); hits != 0; hits &= hits - 1) {
                Entry* entry = &chunk->slots[__builtin_ctz(hits)];
                if (equal(*entry)) return entry;
            }
            if (chunk->overflow == 0) return nullptr;
            if (++at == segment.size) at = 0;
            if (tried == 4) count_extra(segment.size);
        }
        return nullptr;
    }

    // Add an entry that is not in the table. Pointers into the table become invalid. Throws std::length_error, with the table
    // as it was, where too many entries have this hash.
    void insert(const Entry& entry) {
        const u32 hash = Traits::hash(entry);
        if (directory_.empty()) {
            segments_.push_back(allocate(0, 1));  // one page
            directory_.push_back(0);
        }
        u32 number = directory_[index(hash)];
        while (is_full(segments_[number])) {
            const u32 pages = segments_[number].size / kPerPage;
            if (pages == kPagesMax && segments_[number].depth == kDepthMax) throw std::length_error("too many equal hashes");
            pages < kPagesMax ? resize(segments_[number], pages < 3 ? pages + 1 : kPagesMax) : split(number, hash);
            number = directory_[index(hash)];
        }
        place(segments_[number], entry, hash);
        ++size_;
    }

    // Remove an entry that `find` returned. Pointers into the table become invalid.
    void erase(Entry* entry) {
        const u32 hash = Traits::hash(*entry);
        Segment& segment = segments_[directory_[index(hash)]];
        u32 at = find_group(scramble(hash), segment.size);
        Chunk* chunk = chunk_of(segment, at);
        while (entry < chunk->slots || entry >= chunk->slots + kSlots) {
            if (chunk->overflow != 255) --chunk->overflow;
            at = at + 1 == segment.size ? 0 : at + 1;
            chunk = chunk_of(segment, at);
        }
        take_out(segment, chunk, entry);
    }

    template <class Visit>
    void each(Visit visit) const {
        for (const Segment& segment : segments_) visit_segment(segment, visit);  // may change entries, but not their hash
    }

    // Visit the entries of one segment; returns whether more segments follow.
    template <class Visit>
    bool each_of(std::size_t segment, Visit visit) const {
        if (segment < segments_.size()) visit_segment(segments_[segment], visit);
        return segment + 1 < segments_.size();
    }

    // Visit and drop the entries of one segment; returns false when nothing is left. After the first call the table only
    // shrinks: find, insert and erase must not be called.
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
    static u32 find_group(u32 scrambled, u32 size) { return static_cast<u32>((u64{scrambled} * size) >> 32); }
    static u8 tag_of(u32 scrambled) {
        const u8 low = static_cast<u8>(scrambled);
        return low == 0 ? 1 : low;
    }
    // Return the number of pages for `count` entries and one more.
    static u32 pages_for(u32 count) {
        u32 pages = (kPagesMax + 1) / 2;
        while (pages < kPagesMax && (count + 1) * 32 > pages * kPerPage * kSlots * 29) ++pages;
        return pages;
    }
    static bool is_full(const Segment& segment) { return (segment.count + 1) * 32 > segment.size * kSlots * 29; }

    void take_out(Segment& segment, Chunk* chunk, Entry* entry) {
        chunk->tags[entry - chunk->slots] = 0;
        --segment.count;
        --size_;
        if (segment.size <= 2 * kPerPage) return;
        const u32 needed = segment.count * 4 / (3 * kSlots * kPerPage) + 1;
        if (needed * 2 < segment.size / kPerPage) resize(segment, needed);
    }

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
        u32 at = find_group(scrambled, segment.size);
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
        if (segments_[number].depth == depth_) {
            std::vector<u32> doubled(directory_.size() * 2);
            for (std::size_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
            directory_.swap(doubled);
            ++depth_;
        }
        Segment old = segments_[number];
        u32 counts[2] = {0, 0};
        auto count = [&](const Entry& entry) { ++counts[Traits::hash(entry) >> (31 - old.depth) & 1]; };
        visit_segment(old, count);
        Segment halves[2] = {allocate(old.depth + 1u, pages_for(counts[0])), allocate(old.depth + 1u, pages_for(counts[1]))};
        auto move = [&](const Entry& entry) {
            const u32 hash = Traits::hash(entry);
            place(halves[hash >> (31 - old.depth) & 1], entry, hash);
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

    // Fields of every search come first, in one cache line.
    Pages* pages_;
    u32 depth_ = 0;
    std::vector<u32> directory_;
    std::vector<Segment> segments_;
    std::size_t size_ = 0;
};

}  // namespace blockcast
