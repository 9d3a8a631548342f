// Shares: jobs handed out to a team, each thread's in order, so that it can fetch ahead. It knows no job.
//
// A thread that is done takes from the back of another's share: on a machine that does other work as well, somebody is
// always kept from its core for a while, and whoever waits at the end of a call would wait for all that was left to it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "team.h"

namespace tg {

class Shares {
  public:
    // Jobs [0, count), count below 2^32, for a team of `size`; whatever becomes of the team, its threads take them all.
    Shares(std::int64_t count, int size) : size_(std::min(size, MOST)) {
        for (int i = 0; i < size_; ++i)
            shares_[i].range.store(packed(share_begin(count, i, size_), share_begin(count, i + 1, size_)),
                                   std::memory_order_relaxed);
    }

    // The next job of thread `rank`, or -1 when there is none left; `more`: whether the one behind it is likely its next.
    std::int64_t take(int rank, bool& more) {
        if (rank < size_) {
            std::atomic<std::uint64_t>& mine = shares_[rank].range;
            for (std::uint64_t range = mine.load(std::memory_order_relaxed); begin_of(range) < end_of(range);)
                if (mine.compare_exchange_weak(range, range + 1, std::memory_order_relaxed)) {
                    more = begin_of(range) + 1 < end_of(range);
                    return begin_of(range);
                }
        }
        more = false;
        for (int i = 1; i <= size_; ++i) {
            std::atomic<std::uint64_t>& theirs = shares_[(rank + i) % size_].range;
            for (std::uint64_t range = theirs.load(std::memory_order_relaxed); begin_of(range) < end_of(range);)
                if (theirs.compare_exchange_weak(range, packed(begin_of(range), end_of(range) - 1),
                                                 std::memory_order_relaxed))
                    return end_of(range) - 1;
        }
        return -1;
    }

  private:
    static constexpr int MOST = 128;

    struct alignas(64) Share {
        std::atomic<std::uint64_t> range;  // its begin in the lower half, its end in the upper one
    };

    static std::uint64_t packed(std::int64_t begin, std::int64_t end) {
        return static_cast<std::uint64_t>(end) << 32 | static_cast<std::uint64_t>(begin);
    }
    static std::int64_t begin_of(std::uint64_t range) { return static_cast<std::uint32_t>(range); }
    static std::int64_t end_of(std::uint64_t range) { return static_cast<std::int64_t>(range >> 32); }

    int size_;
    Share shares_[MOST];
};

}  // namespace tg
