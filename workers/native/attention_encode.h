// Encode: vectors of the cache as numbers of their format with a scale, as workers/attention/formats.py says. It knows
// no page and no head.
#pragma once

#include "attention_fp8.h"

namespace tg {

constexpr int MOST_DIM = 256;

// fp16 to nearest even; what is too large becomes infinite, NaN stays NaN.
inline std::uint16_t to_fp16(float value) {
    const std::uint32_t bits = load<std::uint32_t>(&value), sign = (bits >> 16) & 0x8000, body = bits & 0x7fffffff;
    // Adding 0.5 leaves a subnormal number's bits, rounded, at the low end.
    const float shifted = load<float>(&body) + 0.5f;
    std::uint32_t half = (body - (112u << 23) + 0xfff + ((body >> 13) & 1)) >> 13;
    if (body < (113u << 23)) half = load<std::uint32_t>(&shifted) - 0x3f000000;
    if (body >= 0x477ff000) half = 0x7c00;
    if (body > 0x7f800000) half = 0x7e00;
    return static_cast<std::uint16_t>(sign | half);
}

inline float largest_magnitude(const float* x, int dim) {
    float most = 0.0f;
    for (int d = 0; d < dim; ++d) most = __builtin_fabsf(x[d]) > most ? __builtin_fabsf(x[d]) : most;
    return most;
}

inline bool is_finite(const float* x, int dim) {
    std::uint32_t most = 0;
    for (int d = 0; d < dim; ++d) {
        const std::uint32_t size = load<std::uint32_t>(x + d) & 0x7fffffff;
        most = size > most ? size : most;
    }
    return most < 0x7f800000;
}

// Elements are nearest((x - lowest) * inverse), all 0 where `inverse` is; `scale` is the vector's word.
struct Scaling {
    float lowest, inverse;
    std::uint32_t scale;
};

// 0 where it would not be finite: then the vector is about 0 everywhere, or all of one value.
inline float inverse_of(float unit) { return unit > 0x1p-126f ? 1.0f / unit : 0.0f; }

template <Format format>
constexpr float largest() {
    return format == INT8 ? 127.0f : Fp8<format == FP8_E4M3 ? FP8_E4M3 : FP8_E5M2>::MOST;
}

// Of elements from `low` to `high`.
inline Scaling int4_scaling(float low, float high) {
    const std::uint16_t lowest = to_bf16(low), step = to_bf16((high - from_bf16(lowest)) / 15.0f);
    return {from_bf16(lowest), inverse_of(from_bf16(step)), step | static_cast<std::uint32_t>(lowest) << 16};
}

// Infinity and NaN spoil the vector that they stand in: its scale is NaN, whose lower bits are 0 (see exp2_below).
template <Format format>
inline Scaling scaling_of(const float* x, int dim) {
    if (!is_finite(x, dim)) return {0.0f, 0.0f, format == INT4 ? 0x7fc07fc0 : 0x7fc00000};
    if constexpr (format == INT4) {
        float low = INFINITE, high = -INFINITE;
        for (int d = 0; d < dim; ++d) {
            low = x[d] < low ? x[d] : low;
            high = x[d] > high ? x[d] : high;
        }
        return int4_scaling(low, high);
    } else {
        const float unit = largest_magnitude(x, dim) / largest<format>();
        return {0.0f, inverse_of(unit), load<std::uint32_t>(&unit)};
    }
}

template <Format format>
inline std::uint8_t nearest(float x) {
    if constexpr (format == INT4) {
        const float whole = __builtin_nearbyintf(x), positive = whole > 0.0f ? whole : 0.0f;
        return static_cast<std::uint8_t>(static_cast<int>(positive < 15.0f ? positive : 15.0f));
    } else {
        // The rounding of unit and quotient may pass the largest number by a hair.
        constexpr float most = largest<format>();
        const float bounded = x > most ? most : x < -most ? -most : x;
        if constexpr (format == INT8)
            return static_cast<std::uint8_t>(static_cast<int>(__builtin_nearbyintf(bounded)));
        else
            return Fp8<format>::from(bounded);
    }
}

// x [dim] as elements of a scaled format, a byte each; returns the scale.
template <Format format>
inline std::uint32_t encode(const float* x, int dim, std::uint8_t* elements) {
    const Scaling scaling = scaling_of<format>(x, dim);
    for (int d = 0; d < dim; ++d) elements[d] = 0;
    if (scaling.inverse != 0.0f)
        for (int d = 0; d < dim; ++d) elements[d] = nearest<format>((x[d] - scaling.lowest) * scaling.inverse);
    return scaling.scale;
}

}  // namespace tg
