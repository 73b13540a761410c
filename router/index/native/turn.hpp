// The writer's hold on the index through much work. Readers (requests, on the event loop) wait for nobody longer than
// kTurnBlocks blocks take: a writer that has changed so many gives the lock up once and takes it again. What it holds then
// is a beginning of its batch; other writers of names wait all the same (Index::ingest_mutex_).
#pragma once

#include <algorithm>
#include <mutex>
#include <shared_mutex>

#include "digest.hpp"

namespace blockcast {

constexpr std::size_t kTurnBlocks = 4096;  // a millisecond or two

// The most blocks that a thread changed under one hold; for tests.
inline thread_local std::size_t longest_turn = 0;

class Turn {
public:
    explicit Turn(std::shared_mutex& mutex) : lock_(mutex) {}

    void pay(std::size_t blocks) {
        paid_ += blocks;
        longest_turn = std::max(longest_turn, paid_);
        if (paid_ >= kTurnBlocks) without([] {});
    }

    template <class Work>
    void without(Work work) {
        lock_.unlock();
        work();
        lock_.lock();
        paid_ = 0;
    }

private:
    std::unique_lock<std::shared_mutex> lock_;
    std::size_t paid_ = 0;
};

}  // namespace blockcast
