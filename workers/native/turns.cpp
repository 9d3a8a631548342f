#include "turns.h"

#include <cstring>
#include <ctime>

#include <poll.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__linux__)
#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tg {
namespace {

constexpr int64_t NAME_BYTES = 64;        // of the segment's head, Python's own
constexpr int64_t LINE_BYTES = 128;       // two cache lines: prefetchers fetch in pairs
constexpr int64_t SLICE_NS = 50'000'000;  // how long a sleeper sleeps before it looks around

struct Head {
    char name[NAME_BYTES];
    std::atomic<uint32_t> hung_up;
};

static_assert(sizeof(Line) <= LINE_BYTES && std::atomic<uint32_t>::is_always_lock_free, "lines lie in shared memory");

Head& head(const tg_member* me) { return *reinterpret_cast<Head*>(me->segment); }

int64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

void breathe() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Sleep until `word` may have changed from `seen`, for SLICE_NS at most. Not a private futex: others share the page.
void doze(std::atomic<uint32_t>& word, uint32_t seen) {
    const timespec slice{0, SLICE_NS};
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &slice, nullptr, 0);
#else
    const timespec moment{0, 200'000};
    if (word.load() == seen) nanosleep(&moment, nullptr);
#endif
}

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

bool reached(uint32_t posted, uint32_t turn) { return int32_t(posted - turn) >= 0; }

int sleep_until(const tg_member* me, int rank, uint32_t turn) {
    Line& theirs = line(me, rank);
    const int64_t began = now_ns();
    for (;;) {
        // Say that one sleeps, then look again: the other posts, then looks for sleepers.
        theirs.sleepers.fetch_add(1);
        const uint32_t posted = theirs.posted.load();
        const bool done = reached(posted, turn);
        if (!done && !head(me).hung_up.load()) doze(theirs.posted, posted);
        theirs.sleepers.fetch_sub(1);
        if (done || reached(theirs.posted.load(), turn)) return 0;
        if (const int code = trouble(me)) {
            // What a peer posted before it left still counts.
            return reached(theirs.posted.load(), turn) ? 0 : code;
        }
        if (now_ns() - began > me->timeout_ns) return hang_up(me, TIMED_OUT + rank);
    }
}

}  // namespace

Line& line(const tg_member* me, int rank) {
    return *reinterpret_cast<Line*>(me->segment + NAME_BYTES + LINE_BYTES * (1 + rank));
}

char* slot(const tg_member* me, int rank, uint32_t turn) {
    const int64_t lines = (NAME_BYTES + LINE_BYTES * (1 + me->world) + 4095) / 4096 * 4096;
    return me->segment + lines + (2 * rank + (turn & 1)) * me->slot;
}

uint32_t next_turn(const tg_member* me) { return line(me, me->rank).posted.load(std::memory_order_relaxed) + 1; }

void hand_over(void* to, const void* from, int64_t bytes) {
    int64_t done = 0;
#if defined(__SSE2__)
    for (; done + 16 <= bytes; done += 16) {
        __m128i piece;
        std::memcpy(&piece, static_cast<const char*>(from) + done, 16);
        _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(to) + done), piece);
    }
    _mm_sfence();  // before the turn is posted
#endif
    std::memcpy(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, bytes - done);
}

int wait_for(const tg_member* me, int rank, uint32_t turn) {
    const std::atomic<uint32_t>& posted = line(me, rank).posted;
    for (int32_t spin = 0; spin <= me->spins; ++spin) {
        if (reached(posted.load(std::memory_order_acquire), turn)) return 0;
        breathe();
    }
    return sleep_until(me, rank, turn);
}

int wait_for_all(const tg_member* me, uint32_t turn) {
    for (int rank = 0; rank < me->world; ++rank) {
        if (rank == me->rank) continue;
        if (const int code = wait_for(me, rank, turn)) return code;
    }
    return 0;
}

void post(const tg_member* me, uint32_t turn) {
    Line& mine = line(me, me->rank);
    mine.posted.store(turn);  // sequentially consistent, as is the look at the sleepers
    if (mine.sleepers.load()) wake(mine.posted);
}

int trouble(const tg_member* me) {
    if (head(me).hung_up.load(std::memory_order_acquire)) return HUNG_UP;
    for (int rank = 0; rank < me->world; ++rank) {
        if (me->peers[rank] < 0) continue;
        // A pidfd can be read from once its process has ended.
        pollfd process{me->peers[rank], POLLIN, 0};
        if (poll(&process, 1, 0) > 0) return hang_up(me, GONE + rank);
    }
    return 0;
}

int hang_up(const tg_member* me, int code) {
    head(me).hung_up.store(1);
    for (int rank = 0; rank < me->world; ++rank) wake(line(me, rank).posted);
    return code;
}

}  // namespace tg
