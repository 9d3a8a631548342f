// Dot: how groups of cached elements are multiplied with queries or weights and summed, one type per format and
// instruction set. It knows neither pages nor softmax.
//
// Each has: Query, the element that multiplies; operand(), some elements of a vector of words, and factor(), the
// matching queries in every lane, in TURNS turns for a GROUP; Sum with step(), the accumulator, and finish(), the sum
// as floats. FORMAT: of the elements. PASS: queries that share a pass at most. ROUNDED: queries and weights are bf16;
// INTEGER: sums are integers, and queries and weights 16 bits of a common unit; neither: all is fp32.
#pragma once

#include "attention_wide.h"

namespace tg {

#if defined(__AVX512BF16__)
// bf16 pairs with the processor's own dot product, which is exact in the products.
template <Format format>
struct Bf16Dot {
    using Query = std::uint16_t;
    using Sum = Floats;
    static constexpr Format FORMAT = format;
    static constexpr int GROUP = group_of(format), TURNS = GROUP / 2;
    static constexpr int PASS = format == BF16 ? PASS_QUERIES : 4;
    static constexpr bool ROUNDED = true, INTEGER = false;

    static inline Words operand(const char* at, int turn) {
        Words words = load<Words>(at);
        if constexpr (format == BF16) {
            asm("" : "+v"(words));  // in a register: GCC 12 would read it again for each query where they are three
            return words;
        } else {
            const __m512i bytes = (__m512i)words;
            return Fp8<format>::to_bf16_pairs(turn ? bytes : _mm512_slli_epi16(bytes, 8));
        }
    }

    static inline Words factor(const Query* group, int turn) { return splat(load<std::uint32_t>(group + 2 * turn)); }

    static inline Sum step(Sum sum, Words a, Words b) { return dot_pairs(sum, a, b); }

    static inline Floats finish(Sum sum) { return sum; }
};
#endif

#if defined(__AVX512VNNI__)
// Pairs of small integers times 16-bit ones, summed exactly: 2 * 127 * 32767 per pair at most, so that up to 512
// elements fit.
template <Format format>
struct IntDot {
    using Query = std::int16_t;
    using Sum = Ints;
    static constexpr Format FORMAT = format;
    static constexpr int GROUP = group_of(format), TURNS = GROUP / 2;
    static constexpr int PASS = format == INT8 ? PASS_QUERIES : 4;
    static constexpr bool ROUNDED = false, INTEGER = true;

    static inline Words operand(const char* at, int turn) {
        const __m512i words = (__m512i)load<Words>(at);
        if constexpr (format == INT8)
            return (Words)_mm512_srai_epi16(turn ? words : _mm512_slli_epi16(words, 8), 8);
        else
            return (Words)_mm512_and_si512(_mm512_srli_epi16(words, 4 * turn), _mm512_set1_epi16(15));
    }

    static inline Words factor(const Query* group, int turn) { return splat(load<std::uint32_t>(group + 2 * turn)); }

    static inline Sum step(Sum sum, Words a, Words b) {
        asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));  // GCC 12 copies the sum around its own intrinsic
        return sum;
    }

    static inline Floats finish(Sum sum) { return __builtin_convertvector(sum, Floats); }
};
#endif

// The Dot of a format in this build.
template <Format format>
struct Chosen {
    using Dot = WideDot<format>;
};
#if defined(__AVX512BF16__)
template <> struct Chosen<BF16> { using Dot = Bf16Dot<BF16>; };
template <> struct Chosen<FP8_E4M3> { using Dot = Bf16Dot<FP8_E4M3>; };
template <> struct Chosen<FP8_E5M2> { using Dot = Bf16Dot<FP8_E5M2>; };
#endif
#if defined(__AVX512VNNI__)
template <> struct Chosen<INT8> { using Dot = IntDot<INT8>; };
template <> struct Chosen<INT4> { using Dot = IntDot<INT4>; };
template <> struct Chosen<INT4_CHANNEL> { using Dot = IntDot<INT4_CHANNEL>; };
#endif

// How many of the `left` queries a pass of at most `most` takes: about evenly many, but never 5, for which no kernel is
// compiled.
constexpr int pass_of(int left, int most) {
    const int passes = (left + most - 1) / most, even = (left + passes - 1) / passes;
    return even != 5 ? even : left == 5 ? 3 : 6;
}

}  // namespace tg
