// Cache: a token's way into the pool, and its query's into a Dot's format: queries and keys are rotated, keys and
// values stored in their tiles.
#pragma once

#include "attention_dot.h"
#include "attention_encode.h"
#include "attention_layer.h"
#include "attention_open.h"

namespace tg {

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

// Store `element` at place `place` of the group that lies at `word`. Two slots share a byte of 4-bit elements, so that
// one thread writes all of a group's.
template <Format format, class Element>
inline void store_element(char* word, int place, Element element) {
    if constexpr (format == INT4) {
        char& both = word[place / 2];
        const int shift = place % 2 * 4;
        both = static_cast<char>((both & ~(15 << shift)) | element << shift);
    } else {
        store(word + place * static_cast<int>(sizeof element), element);
    }
}

// Store x as one vector of a tile; put(d, element) takes an element to its place. `scale` is where the scale goes.
template <Format format, class Put>
inline void store_vector(const float* x, int dim, char* scale, const Put& put) {
    if constexpr (is_scaled(format)) {
        std::uint8_t elements[MOST_DIM];
        store(scale, encode<format>(x, dim, elements));
        for (int d = 0; d < dim; ++d) put(d, elements[d]);
    } else {
        std::uint16_t halves[MOST_DIM];
        for (int d = 0; d < dim; ++d) halves[d] = format == BF16 ? to_bf16(x[d]) : to_fp16(x[d]);
        for (int d = 0; d < dim; ++d) put(d, halves[d]);
    }
}

// Store a key, x [dim], in slot `slot` of `tile`.
template <Format keys>
inline void cache_key(const float* x, int dim, const TileShape& shape, int slot, char* tile) {
    constexpr int group = group_of(keys);
    store_vector<keys>(x, dim, tile + shape.key_scales + slot * WORD, [&](int d, auto element) {
        store_element<keys>(tile + key_word(keys, slot, d) * WORD, place_of(group, d % group), element);
    });
}

// Store a value in slot `slot` of `tile`.
template <Format values>
inline void cache_value(const std::uint16_t* value, int dim, const TileShape& shape, int slot, char* tile) {
    constexpr int values_group = group_of(values);
    float x[MOST_DIM];
    rotate(value, nullptr, dim, x);
    char* const words = tile + shape.values;
    const int place = place_of(values_group, slot % values_group);
    store_vector<values>(x, dim, tile + shape.value_scales + slot * WORD, [&](int d, auto element) {
        store_element<values>(words + value_word(values, slot, d, dim) * WORD, place, element);
    });
}

// Rotate and store all heads of the tokens [first, stop). One thread has all tokens of a block where keys are by
// channel, so that it can seal what it has filled.
template <Format keys, Format values>
inline void cache_tokens(const Layer& layer, int first, int stop) {
    const tg_attention& work = *layer.work;
    const int dim = work.head_dim;
    const TileShape shape(keys, values, dim);
    for (int token = first; token < stop; ++token) {
        std::uint16_t* const heads = layer.heads + token * layer.stride;
        const float* const turns = layer.turns ? layer.turns + static_cast<std::int64_t>(token) * dim : nullptr;
        if (turns)
            for (int head = 0; head < work.q_heads; ++head) turn_query(heads + head * dim, turns, dim);
        const Row& row = row_of(work, token);
        const int position = row.start + token - row.first, offset = position % work.block_size;
        const int place = position / work.block_size, slot = offset % TILE_SLOTS;
        char* page = layer.page + work.tables[row.table + place] * layer.page_bytes;
        const std::uint16_t* key = heads + work.q_heads * dim;
        for (int head = 0; head < work.kv_heads; ++head) {
            char* const tile = page + offset / TILE_SLOTS * shape.bytes;
            float x[MOST_DIM];
            rotate(key, turns, dim, x);
            cache_value<values>(key + work.kv_heads * dim, dim, shape, slot, tile);
            if constexpr (keys == INT4_CHANNEL) {
                store_open(layer, row, place, head, offset, x);
                if (offset + 1 == work.block_size) seal(layer, row, place, head, shape, page);
            } else {
                cache_key<keys>(x, dim, shape, slot, tile);
            }
            key += dim;
            page += shape.head_bytes(work.block_size / TILE_SLOTS);
        }
    }
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

// The sum of a query's elements as its Dot has them.
template <class Query>
inline float sum_of(const Query* query, int dim) {
    float sum = 0.0f;
    for (int d = 0; d < dim; ++d) sum += static_cast<float>(query[d]);
    return sum;
}

}  // namespace tg
