// Lanes: what attention needs of vectors beyond simd.h: powers of two, tanh, comparisons. It knows no page and no
// head.
#pragma once

#include "simd.h"

namespace tg {

typedef std::int16_t Shorts __attribute__((vector_size(2 * LANES)));

constexpr float INFINITE = __builtin_inff();

constexpr int at_most(int a, int b) { return a < b ? a : b; }
constexpr int at_least(int a, int b) { return a > b ? a : b; }

inline Ints lane_numbers() {
    Ints numbers{};
    for (int lane = 0; lane < LANES; ++lane) numbers[lane] = lane;
    return numbers;
}

// The second where one is NaN: the processor's own maximum.
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline bool any_above(Floats value, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)value, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
    const Ints above = value > splat(limit);
    int found = 0;
    for (int lane = 0; lane < LANES; ++lane) found |= above[lane];
    return found != 0;
#endif
}

constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: a float added to it is rounded to an integer, in the low bits

// 2^x for x in [-0.5, 0.5] by minimax polynomials that are exactly 1 at 0: to a relative error of 1e-4 or 1e-7.
template <bool rough>
inline Floats exp2_near_zero(Floats x) {
    if constexpr (rough) {
        const Floats power = (x * 0.05500892922282219f + 0.24221095442771912f) * x + 0.6932829022407532f;
        return power * x + 1.0f;
    }
    Floats power = x * 0.001326472731307149f + 0.009671512991189957f;
    power = power * x + 0.05550733581185341f;
    power = power * x + 0.24022242426872253f;
    power = power * x + 0.6931470036506653f;
    return power * x + 1.0f;
}

// 2^(x * factor - top) for an integer `top` below 2^22 in magnitude and results below 2^127. Exactly 0 when the
// exponent is below -125, so for x = minus infinity. NaN stays, if its lower 9 bits are 0: they are added to it.
template <bool rough>
inline Floats exp2_below(Floats x, float factor, float top) {
    const Floats shifted = splat(ROUNDING - top);
    const Floats whole = x * factor + shifted;
    const Floats power = exp2_near_zero<rough>(x * factor - (whole - shifted));
    const Floats scaled = as_floats(as_words(power) + (as_words(whole) << 23));
    return whole < splat(ROUNDING - 125.0f) ? Floats{} : scaled;
}

// 2^n for an integer n <= 0; 0 when it is below -125.
inline float power_of_two(float n) {
    if (n < -125.0f) return 0.0f;
    const std::int32_t bits = (static_cast<std::int32_t>(n) + 127) << 23;
    return load<float>(&bits);
}

// To an absolute error of 2e-7.
inline Floats tanh_of(Floats x) {
    const Floats most = splat(9.0f);
    const Floats bounded = x > most ? most : (x < -most ? -most : x);
    return 1.0f - 2.0f / (1.0f + exp2_below<false>(bounded, 2.8853900817779268f, 0.0f));
}

}  // namespace tg
