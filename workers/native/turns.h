// Turns of ranks that share one segment of memory: who may write, who must wait, and how a group ends. It knows bytes,
// not what they mean, and not how the segment came about.
//
// Every collective, or piece of one that fits a slot, is a turn. All ranks take the same turns in the same order. Rank
// r owns line r with the number of its latest turn, and two slots, one for odd and one for even turns. A rank writes
// its slot of turn k only when all others have posted turn k - 1: whoever has, is done with turn k - 2, which lay there
// before. It posts turn k once its data is there or, where it only reads, once it has read.
//
// A rank that must wait spins for a moment, then sleeps on the line of the one it waits for; a sleeper looks now and then
// whether the group was hung up and the others' processes are alive. A rank that fails hangs up for all. Nobody yields:
// on a core that others want too, Linux then puts them first for a whole slice, which is milliseconds; a sleeper that is
// woken goes on at once.
#pragma once

#include <atomic>
#include <cstdint>

// One rank's view of the segment; a ctypes.Structure of the same fields is in workers/sharedmemory.py.
struct tg_member {
    char* segment;
    const int32_t* peers;  // a pidfd per rank, -1 for those in this process
    int64_t slot;          // bytes of a slot, a multiple of 64
    int64_t timeout_ns;
    int32_t spins;  // how often a waiter looks before it sleeps
    int32_t rank;
    int32_t world;
};

namespace tg {

struct Line {
    std::atomic<uint32_t> posted;    // the rank's latest turn; wraps around
    std::atomic<uint32_t> sleepers;  // who sleeps on `posted`
    int64_t values[2];               // of one number, for even and for odd turns
};

// What fails a turn: one of these, plus the rank concerned.
constexpr int HUNG_UP = 1 << 12;
constexpr int TIMED_OUT = 2 << 12;
constexpr int GONE = 3 << 12;

Line& line(const tg_member* me, int rank);
char* slot(const tg_member* me, int rank, uint32_t turn);

// The turn that this rank takes next.
uint32_t next_turn(const tg_member* me);

// Copy into a slot, past the cache: a line that another core has read would first have to be taken away from it.
// `to` is 16-byte aligned.
void hand_over(void* to, const void* from, int64_t bytes);

// Until `rank`, or all others, have posted `turn`: 0, or the code of what went wrong. What was posted before counts.
int wait_for(const tg_member* me, int rank, uint32_t turn);
int wait_for_all(const tg_member* me, uint32_t turn);

// This rank is done with `turn`.
void post(const tg_member* me, uint32_t turn);

// 0 while nobody has hung up or ended; else the code to return.
int trouble(const tg_member* me);

// Everyone who waits, or comes to wait, fails. Returns `code`.
int hang_up(const tg_member* me, int code);

}  // namespace tg
