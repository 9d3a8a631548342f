// WideDot: the Dot of every format on every processor, in fp32. See attention_dot.h.
#pragma once

#include "attention_fp8.h"
#include "attention_scratch.h"

namespace tg {

template <Format format>
struct WideDot {
    using Query = float;
    using Sum = Floats;
    static constexpr Format FORMAT = format;
    static constexpr int GROUP = group_of(format), TURNS = GROUP;
    static constexpr int PASS = format == BF16 ? PASS_QUERIES : at_most(3, PASS_QUERIES);  // rare: few kernels
    static constexpr bool ROUNDED = false, INTEGER = false;

    // The elements with number `turn` of each word.
    static inline Floats operand(const char* at, int turn) {
        constexpr int bits = 32 / GROUP;
        const int shift = place_of(GROUP, turn) * bits;
        if constexpr (format == FP16) {
            const auto* const halves = reinterpret_cast<const std::uint16_t*>(at);
            return __builtin_shuffle(from_fp16(halves), from_fp16(halves + LANES), 2 * lane_numbers() + turn);
        }
        const Words words = load<Words>(at);
        if constexpr (format == BF16) return turn ? upper(words) : lower(words);
        if constexpr (format == INT8)
            return __builtin_convertvector((Ints)(words << (32 - bits - shift)) >> (32 - bits), Floats);
        if constexpr (bits == 4) return __builtin_convertvector((Ints)(words >> shift & 15u), Floats);
        if constexpr (format == FP8_E4M3 || format == FP8_E5M2) return Fp8<format>::to_fp32(words >> shift);
    }

    static inline Floats factor(const Query* group, int turn) { return splat(group[turn]); }

    static inline Sum step(Sum sum, Floats a, Floats b) { return sum + a * b; }

    static inline Floats finish(Sum sum) { return sum; }
};

}  // namespace tg
