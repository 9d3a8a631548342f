// What this processor can do at most: multiply-adds that never leave the registers, and memory read once. Nobody serves
// with these; `tidegate bench --roofline` holds the real kernels against them.

#include <omp.h>

#include <cstdint>
#include <utility>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "threads.h"

#if defined(__AVX512F__)
#define TG_REGISTER "+v"
#elif defined(__x86_64__)
#define TG_REGISTER "+x"
#elif defined(__aarch64__)
#define TG_REGISTER "+w"
#else
#define TG_REGISTER "+m"
#endif

namespace {

constexpr int DONE = 0, NOT_HERE = 1;

#if defined(__AVX512F__)
constexpr int WIDTH = 64;
#elif defined(__AVX2__)
constexpr int WIDTH = 32;
#else
constexpr int WIDTH = 16;
#endif

// Sums that do not wait for each other: more than latency × units of the processors we know (10), and with two factors
// no more than the 16 registers of the smaller ones.
constexpr int CHAINS = 12;

using Floats = float __attribute__((vector_size(WIDTH)));

struct Fp32 {
    using Factor = Floats;
    using Sum = Floats;
    static constexpr int PRODUCTS = WIDTH / 4;
    static Sum add(Sum sum, Factor a, Factor b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
struct Bf16 {
    using Factor = __m512bh;
    using Sum = __m512;
    static constexpr int PRODUCTS = 32;
    static Sum add(Sum sum, Factor a, Factor b) { return _mm512_dpbf16_ps(sum, a, b); }
};
#endif

#if defined(__AVX512VNNI__)
struct Int8 {
    using Factor = __m512i;
    using Sum = __m512i;
    static constexpr int PRODUCTS = 64;
    static Sum add(Sum sum, Factor a, Factor b) { return _mm512_dpbusd_epi32(sum, a, b); }
};
#endif

// The chains are spelled out by a fold, not by a loop, so that each sum is a register. The asm statements emit nothing:
// for all that the compiler knows they change what they name, so it can neither tell that all sums are alike, nor take
// the product out of the loop, nor drop what nobody reads.
template <typename Kind, int... Chain>
void multiply_add(int64_t rounds, std::integer_sequence<int, Chain...>) {
    typename Kind::Factor a{}, b{};
    typename Kind::Sum sums[CHAINS]{};
    const auto touch = [](typename Kind::Sum& sum) { asm volatile("" : TG_REGISTER(sum)); };
    (touch(sums[Chain]), ...);
    for (int64_t round = 0; round < rounds; ++round) {
        asm volatile("" : TG_REGISTER(a), TG_REGISTER(b));
        ((sums[Chain] = Kind::add(sums[Chain], a, b)), ...);
    }
    (touch(sums[Chain]), ...);
}

template <typename Kind>
int multiply_add(int64_t rounds, int64_t* operations) {
    int64_t threads = 1;
#pragma omp parallel num_threads(tg::threads())
    {
#pragma omp single nowait
        threads = omp_get_num_threads();
        multiply_add<Kind>(rounds, std::make_integer_sequence<int, CHAINS>{});
    }
    *operations = threads * rounds * CHAINS * Kind::PRODUCTS * 2;
    return DONE;
}

}  // namespace

extern "C" {

// Every thread multiplies and adds for `rounds` rounds; *operations: how many multiplications and additions that were,
// together. kind 0: fp32; 1: pairs of bf16 into fp32; 2: fours of int8 into int32. Returns 1 where this build has no
// instruction for that kind.
int tg_peak_multiply_add(int kind, int64_t rounds, int64_t* operations) {
    switch (kind) {
        case 0:
            return multiply_add<Fp32>(rounds, operations);
#if defined(__AVX512BF16__)
        case 1:
            return multiply_add<Bf16>(rounds, operations);
#endif
#if defined(__AVX512VNNI__)
        case 2:
            return multiply_add<Int8>(rounds, operations);
#endif
        default:
            return NOT_HERE;
    }
}

// Every thread reads its share of `count` words at `data` once, front to back; *sum is theirs all. The processor's own
// prefetching does it best: hints ahead and several streams per thread were slower or no faster.
int tg_peak_read(const uint64_t* data, int64_t count, uint64_t* sum) {
    uint64_t found = 0;
#pragma omp parallel for num_threads(tg::threads()) schedule(static) reduction(+ : found)
    for (int64_t i = 0; i < count; ++i) found += data[i];
    *sum = found;
    return DONE;
}
}
