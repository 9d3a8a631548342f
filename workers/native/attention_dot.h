// Dot: how pairs of cached elements are multiplied with queries or weights and summed, one type per cache format and
// instruction set. It knows neither pages nor softmax.
//
// Each has: Query, the element that multiplies; Operand, a pair of cached elements in each lane; Factor, a pair of
// queries in every lane; Sum with step(), the accumulator, and finish(), the sum as floats. PAIR: bytes of a pair.
// PASS: queries that share a pass at most. ROUNDED: weights are rounded to bf16; INTEGER: sums are integers, and
// queries and weights 16 bits of a common unit; SCALED: cached vectors have a scale.
#pragma once

#include "attention_lanes.h"
#include "attention_page.h"
#include "attention_scratch.h"

namespace tg {

// fp32 products of any format, on any processor.
template <Format format>
struct WideDot {
    using Query = float;
    struct Operand {
        Floats even, odd;
    };
    using Factor = Operand;
    using Sum = Floats;
    static constexpr int PAIR = 2 * element_bytes(format);
    static constexpr int PASS = format == FP16 ? at_most(3, PASS_QUERIES) : PASS_QUERIES;  // rare: few kernels
    static constexpr bool ROUNDED = false, INTEGER = false, SCALED = format == INT8;

    static inline Operand operand(const char* at) {
        if constexpr (format == INT8) {
            const Ints pair = __builtin_convertvector(load<Shorts>(at), Ints);
            return {__builtin_convertvector((pair << 24) >> 24, Floats), __builtin_convertvector(pair >> 8, Floats)};
        }
        if constexpr (format == FP16) {
            const auto* const halves = reinterpret_cast<const std::uint16_t*>(at);
            const Floats a = from_fp16(halves), b = from_fp16(halves + LANES);
            return {__builtin_shuffle(a, b, 2 * lane_numbers()), __builtin_shuffle(a, b, 2 * lane_numbers() + 1)};
        }
        return {lower(load<Words>(at)), upper(load<Words>(at))};
    }

    static inline Factor factor(const Query* pair) { return {splat(pair[0]), splat(pair[1])}; }

    static inline Sum step(Sum sum, Operand a, Factor b) { return sum + a.even * b.even + a.odd * b.odd; }

    static inline Floats finish(Sum sum) { return sum; }
};

#if defined(__AVX512BF16__)
// bf16 pairs with the processor's own dot product, which is exact in the products.
struct Bf16Dot {
    using Query = std::uint16_t;
    using Operand = Words;
    using Factor = Words;
    using Sum = Floats;
    static constexpr int PAIR = 4;
    static constexpr int PASS = PASS_QUERIES;
    static constexpr bool ROUNDED = true, INTEGER = false, SCALED = false;

    static inline Operand operand(const char* at) {
        Words pairs = load<Words>(at);
        asm("" : "+v"(pairs));  // in a register: GCC 12 would read it again for each query where they are three
        return pairs;
    }

    static inline Factor factor(const Query* pair) { return splat(load<std::uint32_t>(pair)); }

    static inline Sum step(Sum sum, Operand a, Factor b) { return dot_pairs(sum, a, b); }

    static inline Floats finish(Sum sum) { return sum; }
};
#endif

#if defined(__AVX512VNNI__)
// int8 pairs times 16-bit integers, summed exactly: 2 * 127 * 32767 per pair, so that up to 512 elements fit.
struct Int8Dot {
    using Query = std::int16_t;
    using Operand = Words;
    using Factor = Words;
    using Sum = Ints;
    static constexpr int PAIR = 2;
    static constexpr int PASS = PASS_QUERIES;
    static constexpr bool ROUNDED = false, INTEGER = true, SCALED = true;

    static inline Operand operand(const char* at) {
        return (Words)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    }

    static inline Factor factor(const Query* pair) { return splat(load<std::uint32_t>(pair)); }

    static inline Sum step(Sum sum, Operand a, Factor b) {
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // GCC 12 copies the sum around its own intrinsic
        return sum;
    }

    static inline Floats finish(Sum sum) { return __builtin_convertvector(sum, Floats); }
};
#endif

// How many of the `left` queries a pass takes: as many as it can, but never 5, for which no kernel is compiled, and
// rather 4 + 4 or 4 + 3 than 6 and a few.
template <class Dot>
constexpr int pass_of(int left) {
    if (Dot::PASS < 6) return left == 4 ? 2 : at_most(left, Dot::PASS);
    return left == 5 ? 3 : left == 7 || left == 8 ? 4 : at_most(left, 6);
}

}  // namespace tg
