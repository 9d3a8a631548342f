// FP8: the two 8-bit floats (arXiv 2209.05433) to and from wider ones. Infinity and NaN are not among the stored ones:
// a vector that holds them is spoiled by its scale, and its elements may be read as any number.
#pragma once

#include "attention_lanes.h"
#include "attention_page.h"

namespace tg {

// MANTISSA bits are below those of the exponent and the sign. Exponent bits e mean 2^(e - BIAS), and 0 subnormal
// numbers.
template <Format format>
struct Fp8 {
    static constexpr int MANTISSA = format == FP8_E4M3 ? 3 : 2;
    static constexpr int BIAS = format == FP8_E4M3 ? 7 : 15;
    static constexpr float MOST = format == FP8_E4M3 ? 448.0f : 57344.0f;
    static constexpr float SMALLEST_NORMAL = format == FP8_E4M3 ? 0x1p-6f : 0x1p-14f;
    static constexpr float ROUNDS_SUBNORMAL = format == FP8_E4M3 ? 0x1p14f : 0x1p7f;  // to their step, when added

    // Nearest, ties to even, for magnitudes up to MOST.
    static inline std::uint8_t from(float value) {
        const auto bits = load<std::uint32_t>(&value), sign = bits >> 24 & 0x80, body = bits & 0x7fffffff;
        const float size = load<float>(&body), shifted = size + ROUNDS_SUBNORMAL, unit = ROUNDS_SUBNORMAL;
        const std::uint32_t even = body >> (23 - MANTISSA) & 1, half = (1u << (22 - MANTISSA)) - 1 + even;
        const std::uint32_t normal = ((body + half) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA);
        const std::uint32_t subnormal = load<std::uint32_t>(&shifted) - load<std::uint32_t>(&unit);
        return static_cast<std::uint8_t>(sign | (size < SMALLEST_NORMAL ? subnormal : normal));
    }

    // The byte in the low end of each lane, whatever is above it.
    static inline Floats to_fp32(Words bytes) {
        const Words body = (bytes & 0x7fu) << (23 - MANTISSA), rebiased = body + ((127u - BIAS) << 23);
        // With exponent 1 in place of 0 the mantissa counts from 1: take that 1 away again.
        const Floats subnormal = as_floats(rebiased + (1u << 23)) - SMALLEST_NORMAL;
        const Floats size = (bytes & 0x7fu) < (1u << MANTISSA) ? subnormal : as_floats(rebiased);
        return as_floats(as_words(size) | (bytes & 0x80u) << 24);
    }

#if defined(__AVX512BF16__)
    // Pairs in bf16, exactly, from those in the upper bytes of the 16-bit halves of each lane.
    static inline Words to_bf16_pairs(__m512i upper_bytes) {
        constexpr short SIGN = -0x8000, EXPONENT = 0x7f >> MANTISSA << 7, BODY = 0x7f00 >> (1 + MANTISSA);
        const __m512i moved = _mm512_srai_epi16(upper_bytes, 1 + MANTISSA);  // the exponent to where bf16 has its own
        const __m512i wide = _mm512_and_si512(moved, _mm512_set1_epi16(SIGN | BODY));
        const __mmask32 normal = _mm512_test_epi16_mask(wide, _mm512_set1_epi16(EXPONENT));
        const __m512i mantissa = _mm512_srli_epi16(wide, 7 - MANTISSA);
        const __m512i size = _mm512_permutexvar_epi16(mantissa, subnormals());
        const __m512i subnormal = _mm512_ternarylogic_epi32(size, wide, _mm512_set1_epi16(SIGN), 0xf8);  // a | (b & c)
        return (Words)_mm512_mask_add_epi16(subnormal, normal, wide, _mm512_set1_epi16((127 - BIAS) << 7));
    }

  private:
    // bf16 of the subnormal numbers, by mantissa.
    static inline __m512i subnormals() {
        constexpr short HALF = (127 - BIAS) << 7;  // half of the smallest normal number
        if constexpr (format == FP8_E5M2)
            return _mm512_castsi128_si512(_mm_setr_epi16(0, HALF - 0x80, HALF, HALF + 0x40, 0, 0, 0, 0));
        return _mm512_castsi128_si512(_mm_setr_epi16(0, HALF - 0x100, HALF - 0x80, HALF - 0x40, HALF, HALF + 0x20,
                                                     HALF + 0x40, HALF + 0x60));
    }
#endif
};

}  // namespace tg
