// Cache: a token's way into the pool, and its query's into a Dot's format: queries and keys are rotated, keys and
// values stored. It knows one token and one head at a time.
#pragma once

#include "attention_dot.h"

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

// to[0, dim) = from, pairs of neighbours turned by `turns`, [dim / 2] of cosine and sine (null: as they are).
inline void rotate(const std::uint16_t* from, const float* turns, int dim, float* to) {
    if (!turns) {
        for (int d = 0; d < dim; ++d) to[d] = from_bf16(from[d]);
        return;
    }
    for (int d = 0; d < dim; d += 2) {
        const float x = from_bf16(from[d]), y = from_bf16(from[d + 1]), cosine = turns[d], sine = turns[d + 1];
        to[d] = x * cosine - y * sine;
        to[d + 1] = x * sine + y * cosine;
    }
}

inline void turn_query(std::uint16_t* query, const float* turns, int dim) {
    float x[MOST_DIM];
    rotate(query, turns, dim, x);
    for (int d = 0; d < dim; ++d) query[d] = to_bf16(x[d]);
}

inline float largest_magnitude(const float* x, int dim) {
    float most = 0.0f;
    for (int d = 0; d < dim; ++d) most = __builtin_fabsf(x[d]) > most ? __builtin_fabsf(x[d]) : most;
    return most;
}

// Store x as one vector of a tile, at(d) being its elements' places; `scale` is where its scale goes.
template <class At>
inline void store_vector(const float* x, int dim, std::int32_t format, char* to, char* scale, At at) {
    if (format == INT8) {
        const float most = largest_magnitude(x, dim), unit = most / 127.0f;
        const float inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
        store(scale, unit);
        for (int d = 0; d < dim; ++d) to[at(d)] = static_cast<char>(__builtin_nearbyintf(x[d] * inverse));
        return;
    }
    std::uint16_t halves[MOST_DIM];
    for (int d = 0; d < dim; ++d) halves[d] = format == BF16 ? to_bf16(x[d]) : to_fp16(x[d]);
    for (int d = 0; d < dim; ++d) store(to + 2 * at(d), halves[d]);
}

// Rotate a token's key of one head, and store it with the value in slot `slot` of `tile`.
inline void cache_token(const std::uint16_t* key, const std::uint16_t* value, const float* turns, int dim,
                        std::int32_t format, int slot, char* tile) {
    const TileShape shape(format, dim);
    float x[MOST_DIM];
    rotate(key, turns, dim, x);
    store_vector(x, dim, format, tile, tile + shape.key_scale(slot), [=](int d) { return key_at(slot, d); });
    rotate(value, nullptr, dim, x);
    store_vector(x, dim, format, tile + shape.values, tile + shape.value_scale(slot),
                 [=](int d) { return value_at(slot, d, dim); });
}

// A query as a Dot wants it, from bf16; returns by how much its products are too small.
template <class Dot>
inline float take_query(const std::uint16_t* from, typename Dot::Query* to, int dim) {
    if constexpr (Dot::ROUNDED) {
        std::memcpy(to, from, dim * sizeof *to);
        return 1.0f;
    }
    if constexpr (Dot::INTEGER) {
        float x[MOST_DIM];
        for (int d = 0; d < dim; ++d) x[d] = from_bf16(from[d]);
        float most = largest_magnitude(x, dim);
        most = most > 1e-30f ? most : 1e-30f;
        for (int d = 0; d < dim; ++d) to[d] = static_cast<std::int16_t>(__builtin_nearbyintf(x[d] * (32767.0f / most)));
        return most / 32767.0f;
    }
    if constexpr (!Dot::ROUNDED && !Dot::INTEGER)
        for (int d = 0; d < dim; ++d) to[d] = from_bf16(from[d]);
    return 1.0f;
}

}  // namespace tg
