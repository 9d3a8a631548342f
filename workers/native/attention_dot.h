// Dot: how pairs of cached elements are multiplied with queries or weights and summed, one type per cache format and
// instruction set. It knows neither pages nor softmax.
//
// Each has: Query, the element that multiplies; operand(), a vector of pairs of cached elements, and factor(), a pair of
// queries in every lane, both in HALVES turns where one instruction does not take a pair; Sum with step(), the
// accumulator, and finish(), the sum as floats. PAIR: bytes of a pair. PASS: queries that share a pass at most. ROUNDED:
// weights are rounded to bf16; INTEGER: sums are integers, and queries and weights 16 bits of a common unit; SCALED:
// cached vectors have a scale.
#pragma once

#include "attention_lanes.h"
#include "attention_page.h"
#include "attention_scratch.h"

namespace tg {

// fp32 products of any format, on any processor.
template <Format format>
struct WideDot {
    using Query = float;
    using Sum = Floats;
    static constexpr int HALVES = 2;
    static constexpr int PAIR = 2 * element_bytes(format);
    static constexpr int PASS = format == FP16 ? at_most(3, PASS_QUERIES) : PASS_QUERIES;  // rare: few kernels
    static constexpr bool ROUNDED = false, INTEGER = false, SCALED = format == INT8;

    // The even or the odd elements.
    static inline Floats operand(const char* at, int half) {
        if constexpr (format == INT8) {
            const Ints pairs = __builtin_convertvector(load<Shorts>(at), Ints);
            return __builtin_convertvector(half ? pairs >> 8 : (pairs << 24) >> 24, Floats);
        }
        if constexpr (format == FP16) {
            const auto* const halves = reinterpret_cast<const std::uint16_t*>(at);
            return __builtin_shuffle(from_fp16(halves), from_fp16(halves + LANES), 2 * lane_numbers() + half);
        }
        return half ? upper(load<Words>(at)) : lower(load<Words>(at));
    }

    static inline Floats factor(const Query* pair, int half) { return splat(pair[half]); }

    static inline Sum step(Sum sum, Floats a, Floats b) { return sum + a * b; }

    static inline Floats finish(Sum sum) { return sum; }
};

#if defined(__AVX512BF16__)
// bf16 pairs with the processor's own dot product, which is exact in the products.
struct Bf16Dot {
    using Query = std::uint16_t;
    using Sum = Floats;
    static constexpr int HALVES = 1;
    static constexpr int PAIR = 4;
    static constexpr int PASS = PASS_QUERIES;
    static constexpr bool ROUNDED = true, INTEGER = false, SCALED = false;

    static inline Words operand(const char* at, int) {
        Words pairs = load<Words>(at);
        asm("" : "+v"(pairs));  // in a register: GCC 12 would read it again for each query where they are three
        return pairs;
    }

    static inline Words factor(const Query* pair, int) { return splat(load<std::uint32_t>(pair)); }

    static inline Sum step(Sum sum, Words a, Words b) { return dot_pairs(sum, a, b); }

    static inline Floats finish(Sum sum) { return sum; }
};
#endif

#if defined(__AVX512VNNI__)
// int8 pairs times 16-bit integers, summed exactly: 2 * 127 * 32767 per pair, so that up to 512 elements fit.
struct Int8Dot {
    using Query = std::int16_t;
    using Sum = Ints;
    static constexpr int HALVES = 1;
    static constexpr int PAIR = 2;
    static constexpr int PASS = PASS_QUERIES;
    static constexpr bool ROUNDED = false, INTEGER = true, SCALED = true;

    static inline Words operand(const char* at, int) {
        return (Words)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    }

    static inline Words factor(const Query* pair, int) { return splat(load<std::uint32_t>(pair)); }

    static inline Sum step(Sum sum, Words a, Words b) {
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // GCC 12 copies the sum around its own intrinsic
        return sum;
    }

    static inline Floats finish(Sum sum) { return __builtin_convertvector(sum, Floats); }
};
#endif

// How many of the `left` queries a pass takes: about evenly many, but never 5, for which no kernel is compiled.
template <class Dot>
constexpr int pass_of(int left) {
    const int passes = (left + Dot::PASS - 1) / Dot::PASS, even = (left + passes - 1) / passes;
    return even != 5 ? even : left == 5 ? 3 : 6;
}

}  // namespace tg
