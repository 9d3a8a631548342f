// A team: work that OpenMP's threads share. It knows no kernel.
#pragma once

#include <omp.h>

#include <cstdint>

#include "threads.h"

namespace tg {

// work(rank, size) once in each thread of a team; in this thread alone when `small`, as waking another costs a few
// microseconds, and so does OpenMP's team of one.
template <class Work>
inline void in_team(bool small, const Work& work) {
    const int wanted = small ? 1 : threads();
    if (wanted == 1) {
        work(0, 1);
        return;
    }
#pragma omp parallel num_threads(wanted)
    work(omp_get_thread_num(), omp_get_num_threads());
}

// Wait for the rest of the team.
inline void meet(int size) {
    if (size > 1) {
#pragma omp barrier
    }
}

// Where the share of `rank` out of `size` begins in `count` units; it ends where the next one's begins.
inline std::int64_t share_begin(std::int64_t count, int rank, int size) { return count * rank / size; }

}  // namespace tg
