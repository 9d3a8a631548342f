#include "threads.h"

#include <omp.h>

#include <atomic>

namespace {
std::atomic<int> wanted{0};
}

int tg::threads() {
    const int told = wanted.load(std::memory_order_relaxed);
    return told > 0 ? told : omp_get_max_threads();
}

extern "C" {

// Set the number of threads of all later calls; below 1: OpenMP's own number.
int tg_set_threads(int threads) {
    wanted.store(threads, std::memory_order_relaxed);
    return 0;
}

// The number of threads that a parallel region gets now; the answer is the return value.
int tg_threads() {
    int found = 1;
#pragma omp parallel num_threads(tg::threads())
#pragma omp single
    found = omp_get_num_threads();
    return found;
}

// The widest vector unit that the compiler was allowed to use, in bits; 0 for a plain build on x86.
int tg_vector_bits() {
#if defined(__AVX512F__)
    return 512;
#elif defined(__AVX2__)
    return 256;
#else
    return 0;
#endif
}
}
