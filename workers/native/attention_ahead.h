// Ahead: the tiles of the next step, fetched into the second-level cache a few lines at a time while this step
// computes. Asked for all at once they would only queue up in front of it. It knows addresses only.
#pragma once

#include <cstddef>

namespace tg {

class Ahead {
  public:
    static constexpr int MOST = 4;
    static constexpr int LINE = 64;

    // From now on fetch `count` tiles, at least one, of `bytes` bytes.
    void begin(const char* const* tiles, int count, std::size_t bytes) {
        for (int i = 0; i < count; ++i) tiles_[i] = tiles[count - 1 - i];
        left_ = count;
        bytes_ = bytes;
        turn();
    }

    template <int lines>
    inline __attribute__((always_inline)) void step() {
        if (at_ == end_) return;
#pragma GCC unroll 8
        for (int i = 0; i < lines; ++i) __builtin_prefetch(at_ + i * LINE, 0, 2);
        at_ += lines * LINE;
        if (at_ >= end_) turn();
    }

    // What is left, at once.
    void finish() {
        while (at_ != end_) step<2>();
    }

  private:
    __attribute__((noinline)) void turn() {
        at_ = end_ = nullptr;
        if (!left_) return;
        at_ = tiles_[--left_];
        end_ = at_ + bytes_;
    }

    const char* tiles_[MOST];  // the next one last
    int left_ = 0;
    std::size_t bytes_ = 0;
    const char* at_ = nullptr;
    const char* end_ = nullptr;
};

}  // namespace tg
