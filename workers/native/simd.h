// Vectors of the width this build has, and the few operations on them that the kernels are written in: 16-bit formats
// to fp32 and back, products of bf16 pairs, exp and its kin. It knows no matrix and no cache.
//
// All of it is GCC's vector extension, except where a processor has an instruction that C++ cannot name.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace tg {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef std::int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef std::uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef std::uint16_t Halves __attribute__((vector_size(2 * LANES)));

// A vector from memory of any alignment; to memory the same way.
template <class Vector>
inline Vector load(const void* from) {
    Vector found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

template <class Vector>
inline void store(void* to, Vector vector) {
    std::memcpy(to, &vector, sizeof vector);
}

inline Floats load(const float* from) { return load<Floats>(from); }

// One value in every lane. (x - 0 is x for every x, which x + 0 is not: the compiler sees a broadcast.)
inline Floats splat(float value) { return value - Floats{}; }
inline Words splat(std::uint32_t value) { return value + Words{}; }
inline Ints splat(std::int32_t value) { return value + Ints{}; }

inline Floats as_floats(Words bits) { return (Floats)bits; }
inline Words as_words(Floats values) { return (Words)values; }

// condition ? a : b in each lane; `condition` comes from a comparison.
inline Floats choose(Ints condition, Floats a, Floats b) { return condition ? a : b; }

// A NaN in `value` stays. (GCC does not see the processor's minimum in the comparison, as others read it otherwise.)
inline Floats at_least(Floats value, Floats least) {
#if defined(__AVX512F__)
    return (Floats)_mm512_maskz_max_ps(0xffff, (__m512)least, (__m512)value);
#else
    return choose(value < least, least, value);
#endif
}
inline Floats at_most(Floats value, Floats most) {
#if defined(__AVX512F__)
    return (Floats)_mm512_maskz_min_ps(0xffff, (__m512)most, (__m512)value);
#else
    return choose(value > most, most, value);
#endif
}

inline Floats magnitude(Floats value) { return as_floats(as_words(value) & 0x7fffffffu); }

// All lanes joined by `join`, the distant ones first: one order for every caller of this build.
template <class Vector, class Join>
inline auto across(Vector value, const Join& join) {
#if defined(__AVX512F__)
    value = join(value, __builtin_shuffle(value, Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    value = join(value, __builtin_shuffle(value, Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    value = join(value, __builtin_shuffle(value, Ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    value = join(value, __builtin_shuffle(value, Ints{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
#elif defined(__AVX2__)
    value = join(value, __builtin_shuffle(value, Ints{4, 5, 6, 7, 0, 1, 2, 3}));
    value = join(value, __builtin_shuffle(value, Ints{2, 3, 0, 1, 6, 7, 4, 5}));
    value = join(value, __builtin_shuffle(value, Ints{1, 0, 3, 2, 5, 4, 7, 6}));
#else
    value = join(value, __builtin_shuffle(value, Ints{2, 3, 0, 1}));
    value = join(value, __builtin_shuffle(value, Ints{1, 0, 3, 2}));
#endif
    return value[0];
}

template <class Vector>
inline auto total(Vector value) {
    return across(value, [](Vector a, Vector b) { return a + b; });
}

inline float greatest(Floats value) {
    return across(value, [](Floats a, Floats b) { return choose(a > b, a, b); });
}

// ---- bf16: the upper half of an fp32

// The lower and the upper one of a pair of bf16 in each 32-bit lane.
inline Floats lower(Words pairs) { return as_floats(pairs << 16); }
inline Floats upper(Words pairs) { return as_floats(pairs & 0xffff0000u); }

// sum + x.lower * w.lower + x.upper * w.upper in fp32. The processor's own instruction takes subnormal numbers as 0
// and rounds once per product; without it each product is added by itself.
inline Floats dot_pairs(Floats sum, Words x, Words w) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#else
    sum += lower(x) * lower(w);
    sum += upper(x) * upper(w);
    return sum;
#endif
}

inline Floats from_bf16(const std::uint16_t* from) {
    return as_floats(__builtin_convertvector(load<Halves>(from), Words) << 16);
}

// Nearest, ties to even; NaN stays NaN.
inline Halves to_bf16(Floats value) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)value);
#else
    const Words bits = as_words(value);
    const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const Words broken = (Words)(value != value);
    return __builtin_convertvector((((broken & (bits | 0x400000u)) | (~broken & rounded)) >> 16), Halves);
#endif
}

inline float from_bf16(std::uint16_t bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

inline std::uint16_t to_bf16(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return static_cast<std::uint16_t>((bits | 0x400000u) >> 16);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// ---- fp16

inline Floats from_fp16(const std::uint16_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)load<Halves>(from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps((__m128i)load<Halves>(from));
#else
    // Shift exponent and mantissa into place and let one product correct the bias: it is exact, subnormals included.
    const Words bits = __builtin_convertvector(load<Halves>(from), Words);
    const Floats scaled = as_floats((bits & 0x7fffu) << 13) * splat(0x1p112f);
    const Words special = (Words)((bits & 0x7c00u) == 0x7c00u);
    const Words magnitude_bits = as_words(scaled) | (special & 0x7f800000u);
    return as_floats(magnitude_bits | ((bits & 0x8000u) << 16));
#endif
}

// ---- functions, to about 2 units in the last place of fp32

// e^x; 0 and infinity are cut to the least and greatest normal numbers (x beyond -87.3 and 88.3).
inline Floats exponential(Floats x) {
    const Floats inside = at_most(at_least(x, splat(-87.3f)), splat(88.3f));
    // x = n ln 2 + r, |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to a whole number.
    const Floats shifted = inside * 1.44269504f + 12582912.0f;
    const Floats n = shifted - 12582912.0f;
    Floats r = inside - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    // Taylor's series; the first term left out is r^8 / 8! < 6e-9.
    Floats sum = splat(1.0f / 5040);
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    const Words power = (as_words(shifted) << 23) + (127u << 23);  // 2^n: n is what lies in the lowest bits
    return sum * as_floats(power);
}

// 1 / (1 + e^-x)
inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// erf, by Abramowitz and Stegun 7.1.26; the error is below 5e-7 in fp32.
inline Floats error_function(Floats x) {
    const Floats size = magnitude(x);
    const Floats t = 1.0f / (1.0f + 0.3275911f * size);
    Floats sum = t * 1.061405429f - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = sum * t + 0.254829592f;
    const Floats positive = 1.0f - sum * t * exponential(-size * size);
    return as_floats(as_words(positive) | (as_words(x) & 0x80000000u));
}

}  // namespace tg
