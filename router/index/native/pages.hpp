// Memory for names and blocks: pages that tables share, and a pool with items that never move.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "digest.hpp"

namespace blockcast {

// Pages of 2 KiB by number, cut from slabs of 2 MiB. Freed pages are reused and never returned to the system.
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

// Items by a 32-bit id that starts at 1 (0 = none). Chunks never move, so growing costs one small allocation. Items are
// trivially copyable and at least 4 bytes; a freed one holds the id of the next freed one.
template <class Item>
class Pool {
public:
    Item& operator[](u32 id) { return chunks_[id / kChunk][id % kChunk]; }
    const Item& operator[](u32 id) const { return chunks_[id / kChunk][id % kChunk]; }

    u32 allocate() {
        if (free_ != 0) {
            const u32 id = free_;
            std::memcpy(&free_, &(*this)[id], sizeof free_);
            return id;
        }
        if (next_ / kChunk == chunks_.size()) {
            chunks_.emplace_back(static_cast<Item*>(std::aligned_alloc(4096, kChunk * sizeof(Item))));
            if (!chunks_.back()) throw std::bad_alloc();
        }
        return next_++;
    }

    bool holds(u32 id) const { return id < next_; }

    void free(u32 id) {
        std::memcpy(static_cast<void*>(&(*this)[id]), &free_, sizeof free_);
        free_ = id;
    }

    std::size_t bytes() const { return chunks_.size() * kChunk * sizeof(Item); }

private:
    static constexpr u32 kChunk = 4096;
    struct Free {
        void operator()(Item* items) const { std::free(items); }
    };
    std::vector<std::unique_ptr<Item[], Free>> chunks_;
    u32 free_ = 0, next_ = 1;
};

}  // namespace blockcast
