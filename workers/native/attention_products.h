// The two products of attention over one step of keys: queries with keys, weights with values. Sums stay in
// registers, up to PASS_QUERIES query vectors by WIDE vectors of lanes. Each runs over its dimension in one order,
// whatever the shape it is computed in, so that a query's bits do not depend on which others go with it.
#pragma once

#include "attention_ahead.h"
#include "attention_dot.h"
#include "attention_scratch.h"

namespace tg {

constexpr int TILE_PAIRS = TILE_SLOTS / 2;
static_assert(STEP_KEYS == Ahead::MOST * TILE_SLOTS && PARTITION_KEYS % STEP_KEYS == 0, "steps are whole tiles");

// Lines to fetch ahead per turn of an inner loop: as many as one of full width reads.
template <class Dot>
constexpr int LINES = at_least(1, WIDE * LANES * Dot::PAIR / Ahead::LINE);

// The keys [base, base + STEP_KEYS) of one head as they lie in the pool. Where there are fewer, the first tile stands in
// for those that are not there.
struct Step {
    const char* tiles[STEP_KEYS / TILE_SLOTS];
    const TileShape* shape;
    int dim;
    int base;

    const char* values(int pair, int pair_bytes) const {
        return tiles[pair / TILE_PAIRS] + shape->values + pair % TILE_PAIRS * pair_bytes;
    }
};

// One turn of both: to sums [Queries][Vectors] add the pairs at `at` times the factors at `factors`, `stride` elements
// apart. Halves of pairs one after the other, so that as few operands as possible are in registers at a time.
template <class Dot, int Queries, int Vectors>
inline __attribute__((always_inline)) void add_pairs(typename Dot::Sum (&sums)[Queries][Vectors],
                                                     const char* const (&at)[Vectors],
                                                     const typename Dot::Query* factors, int stride) {
#pragma GCC unroll 2
    for (int half = 0; half < Dot::HALVES; ++half) {
        decltype(Dot::operand(at[0], half)) operands[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) operands[v] = Dot::operand(at[v], half);
#pragma GCC unroll 6
        for (int i = 0; i < Queries; ++i) {
            const auto factor = Dot::factor(factors + i * stride, half);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) sums[i][v] = Dot::step(sums[i][v], operands[v], factor);
        }
    }
}

// products [Queries][STEP_KEYS]: `Vectors` vectors of keys from `first` on; times the keys' scales.
template <class Dot, int Queries, int Vectors>
inline void multiply_some_keys(const Step& step, const typename Dot::Query* queries, int first, Ahead& ahead,
                               float* products) {
    typename Dot::Sum sums[Queries][Vectors] = {};
    const char* keys[Vectors];
    for (int v = 0; v < Vectors; ++v) {
        const int slot = (first + v) * LANES;
        keys[v] = step.tiles[slot / TILE_SLOTS] + slot % TILE_SLOTS * Dot::PAIR;
    }
    for (int pair = 0; pair < step.dim / 2; ++pair) {
        ahead.step<LINES<Dot>>();
        const char* at[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) at[v] = keys[v] + pair * TILE_SLOTS * Dot::PAIR;
        add_pairs<Dot>(sums, at, queries + 2 * pair, step.dim);
    }
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
        const int slot = (first + v) * LANES;
        Floats scales = splat(1.0f);
        if constexpr (Dot::SCALED)
            scales = load<Floats>(step.tiles[slot / TILE_SLOTS] + step.shape->key_scale(slot % TILE_SLOTS));
#pragma GCC unroll 6
        for (int i = 0; i < Queries; ++i) store(products + i * STEP_KEYS + slot, Dot::finish(sums[i][v]) * scales);
    }
}

// The first `vectors` vectors of keys, and perhaps one that follows them.
template <class Dot, int Queries>
inline void multiply_keys(const Step& step, const typename Dot::Query* queries, int vectors, Ahead& ahead,
                          float* products) {
    int v = 0;
    for (; v + WIDE <= vectors; v += WIDE) multiply_some_keys<Dot, Queries, WIDE>(step, queries, v, ahead, products);
    for (; v < vectors; v += WIDE / 2) multiply_some_keys<Dot, Queries, WIDE / 2>(step, queries, v, ahead, products);
}

// The values of slots [from, to) of a step. A pair of which only one slot counts lies at `edges`, the other one
// blanked: the first pair's copy, then the last one's.
struct Values {
    const Step* step;
    int from, to;
    const char* edges;
};

// A slot that nobody sees may hold NaN, which a weight of 0 would not silence.
template <class Dot>
inline const char* blank_edges(const Step& step, int from, int to, float* edges) {
    constexpr int ELEMENT = Dot::PAIR / 2;
    const int pair_bytes = step.dim * Dot::PAIR;
    char* const copies = reinterpret_cast<char*>(edges);
    const auto copy = [&](int pair, int kept, char* copy) {
        const char* const found = step.values(pair, pair_bytes);
        std::memset(copy, 0, pair_bytes);
        for (int at = kept * ELEMENT; at < pair_bytes; at += Dot::PAIR) std::memcpy(copy + at, found + at, ELEMENT);
    };
    if (from % 2) copy(from / 2, 1, copies);
    if (to % 2) copy(to / 2, 0, copies + pair_bytes);
    return copies;
}

// `Vectors` vectors of dimensions from `column` on.
template <class Dot, int Queries, int Vectors>
inline void multiply_some_values(const Values& values, const typename Dot::Query* weights, const float* fades,
                                 const float* units, int column, Ahead& ahead, float* sums) {
    const Step& step = *values.step;
    const int pair_bytes = step.dim * Dot::PAIR;
    typename Dot::Sum found[Queries][Vectors] = {};
    float* const out = sums + column * LANES;
    if constexpr (!Dot::INTEGER) {
#pragma GCC unroll 6
        for (int i = 0; i < Queries; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) found[i][v] = load<Floats>(out + i * step.dim + v * LANES) * fades[i];
    }
    for (int pair = values.from / 2; pair < (values.to + 1) / 2; ++pair) {
        ahead.step<LINES<Dot>>();
        const char* at = step.values(pair, pair_bytes);
        if (2 * pair < values.from) at = values.edges;
        if (2 * pair + 1 == values.to) at = values.edges + pair_bytes;
        const char* vectors[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) vectors[v] = at + (column + v) * LANES * Dot::PAIR;
        add_pairs<Dot>(found, vectors, weights + 2 * pair, STEP_KEYS);
    }
#pragma GCC unroll 6
    for (int i = 0; i < Queries; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) {
            float* const at = out + i * step.dim + v * LANES;
            Floats sum = Dot::finish(found[i][v]);
            if constexpr (Dot::INTEGER) sum = load<Floats>(at) * fades[i] + sum * units[i];
            store(at, sum);
        }
    }
}

// sums [Queries][dim] shrink by `fades`, then take values times `weights` [Queries][STEP_KEYS] (integers of `units`).
template <class Dot, int Queries>
inline void multiply_values(const Values& values, const typename Dot::Query* weights, const float* fades,
                            const float* units, Ahead& ahead, float* sums) {
    const int columns = values.step->dim / LANES;
    int at = 0;
    for (; at + WIDE <= columns; at += WIDE)
        multiply_some_values<Dot, Queries, WIDE>(values, weights, fades, units, at, ahead, sums);
    for (; at < columns; ++at) multiply_some_values<Dot, Queries, 1>(values, weights, fades, units, at, ahead, sums);
}

}  // namespace tg
