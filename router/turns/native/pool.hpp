// Memory for the small things that every request leaves behind for minutes: from lists of their own by size, so that they do
// not cut up the heap in which prompts and bodies come and go, and larger ones in blocks from there. What was freed is used
// again, never given back: it is bounded by the most that was in use. For one thread at a time: whoever calls holds the GIL.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <list>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace blockcast {

class Pool {
public:
    static constexpr std::size_t kStep = 16, kMost = 1024;

    static void* take(std::size_t bytes) {
        Piece*& first = free_[place(bytes)];
        if (first == nullptr) return cut((place(bytes) + 1) * kStep);
        Piece* const found = first;
        first = found->next;
        return found;
    }
    static void give(void* memory, std::size_t bytes) {
        Piece*& first = free_[place(bytes)];
        first = new (memory) Piece{first};
    }

private:
    struct Piece {
        Piece* next;
    };
    static std::size_t place(std::size_t bytes) { return (bytes - 1) / kStep; }
    static void* cut(std::size_t bytes) {
        constexpr std::size_t kSlab = 64 << 10;
        if (left_ < bytes) {
            next_ = static_cast<char*>(::operator new(kSlab));
            left_ = kSlab;
        }
        void* const found = next_;
        next_ += bytes;
        left_ -= bytes;
        return found;
    }

    inline static std::array<Piece*, kMost / kStep> free_{};
    inline static char* next_ = nullptr;
    inline static std::size_t left_ = 0;
};

// For the standard's containers.
template <typename T>
struct Pooled {
    using value_type = T;
    Pooled() = default;
    template <typename U>
    Pooled(const Pooled<U>&) {}

    T* allocate(std::size_t count) {
        const std::size_t bytes = count * sizeof(T);
        if (bytes == 0 || bytes > Pool::kMost) return static_cast<T*>(::operator new(bytes));
        return static_cast<T*>(Pool::take(bytes));
    }
    void deallocate(T* memory, std::size_t count) {
        const std::size_t bytes = count * sizeof(T);
        if (bytes == 0 || bytes > Pool::kMost) {
            ::operator delete(memory);
        } else {
            Pool::give(memory, bytes);
        }
    }
    template <typename U>
    bool operator==(const Pooled<U>&) const { return true; }
    template <typename U>
    bool operator!=(const Pooled<U>&) const { return false; }
};

using Text = std::basic_string<char, std::char_traits<char>, Pooled<char>>;
template <typename T>
using Vector = std::vector<T, Pooled<T>>;
template <typename T>
using List = std::list<T, Pooled<T>>;
template <typename Key, typename T, typename Hash = std::hash<Key>>
using Map = std::unordered_map<Key, T, Hash, std::equal_to<Key>, Pooled<std::pair<const Key, T>>>;

// A copy of some numbers, in blocks.
template <typename T>
class Blocks {
public:
    static_assert(std::is_trivially_copyable_v<T>);
    static constexpr std::size_t kEach = Pool::kMost / sizeof(T);

    Blocks(const T* first, std::size_t count) : size(count) {
        blocks_.reserve((count + kEach - 1) / kEach);
        for (std::size_t at = 0; at < count; at += kEach) {
            blocks_.push_back(Pooled<T>().allocate(length(at)));
            std::memcpy(blocks_.back(), first + at, length(at) * sizeof(T));
        }
    }
    ~Blocks() {
        for (std::size_t i = 0; i < blocks_.size(); ++i) Pooled<T>().deallocate(blocks_[i], length(i * kEach));
    }
    Blocks(const Blocks&) = delete;
    Blocks& operator=(const Blocks&) = delete;

    // From this place on, which is one of theirs, so many of them side by side.
    std::pair<const T*, std::size_t> from(std::size_t at) const {
        const std::size_t within = at % kEach;
        return {blocks_[at / kEach] + within, length(at - within) - within};
    }

    const std::size_t size;

private:
    // Of the block that begins there.
    std::size_t length(std::size_t at) const { return std::min(kEach, size - at); }

    Vector<T*> blocks_;
};

template <typename T, typename... Fields>
std::shared_ptr<T> make(Fields&&... fields) {
    return std::allocate_shared<T>(Pooled<T>(), std::forward<Fields>(fields)...);
}

struct TextHash {
    std::size_t operator()(const Text& text) const { return std::hash<std::string_view>()(text); }
};

}  // namespace blockcast
