// The two products of attention over one step of keys: queries with keys, weights with values. Sums stay in
// registers, up to PASS_QUERIES query vectors by WIDE vectors of lanes. Each runs over its dimension in one order,
// whatever the shape it is computed in, so that a query's bits do not depend on which others go with it.
#pragma once

#include "attention_ahead.h"
#include "attention_dot.h"
#include "attention_scratch.h"

namespace tg {

static_assert(STEP_KEYS == Ahead::MOST * TILE_SLOTS && PARTITION_KEYS % STEP_KEYS == 0, "steps are whole tiles");

// Lines to fetch ahead per turn of an inner loop: as many as one of full width reads.
constexpr int LINES = at_least(1, WIDE * LANES * WORD / Ahead::LINE);

// The keys [base, base + STEP_KEYS) of one head as they lie in the pool. For tiles that are not there, or that nobody
// sees, another stands in. `keys`: where the keys of a tile begin, with the tile unless they are open; `channels`: the
// scales of keys by channel that are sealed, which a step then has from one block.
struct Step {
    const char* tiles[STEP_KEYS / TILE_SLOTS];
    const char* keys[STEP_KEYS / TILE_SLOTS];
    const char* channels;
    const TileShape* shape;
    int dim;
    int base;

    // The words of the `group` slots from index * group on.
    const char* values(int index, int group) const {
        const int per_tile = TILE_SLOTS / group;
        return tiles[index / per_tile] + shape->values + static_cast<std::size_t>(index % per_tile) * dim * WORD;
    }

    // The scales of a vector of lanes from `slot` on, of keys or of values.
    Words scales(int slot, std::size_t where) const {
        return load<Words>(tiles[slot / TILE_SLOTS] + where + slot % TILE_SLOTS * WORD);
    }
};

// One turn of both: to sums [Queries][Vectors] add the groups at `at` times the factors at `factors`, `stride` elements
// apart. Parts of groups one after the other, so that as few operands as possible are in registers at a time.
template <class Dot, int Queries, int Vectors>
inline __attribute__((always_inline)) void add_groups(typename Dot::Sum (&sums)[Queries][Vectors],
                                                      const char* const (&at)[Vectors],
                                                      const typename Dot::Query* factors, int stride) {
#pragma GCC unroll 8
    for (int turn = 0; turn < Dot::TURNS; ++turn) {
        decltype(Dot::operand(at[0], turn)) operands[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) operands[v] = Dot::operand(at[v], turn);
#pragma GCC unroll 6
        for (int i = 0; i < Queries; ++i) {
            const auto factor = Dot::factor(factors + i * stride, turn);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) sums[i][v] = Dot::step(sums[i][v], operands[v], factor);
        }
    }
}

// The queries of a pass, [][dim], and what each of them sums to; with keys by channel what its products are short of,
// and their unit.
template <class Dot>
struct Queried {
    const typename Dot::Query* queries;
    const float* sums;
    const float* units;
};

// Products with elements as they are stored, of query `i`, to those with their numbers: by the scales of the keys from
// `slot` on.
template <class Dot>
inline Floats scale(Floats product, const Step& step, int slot, const Queried<Dot>& pass, int i) {
    if constexpr (Dot::FORMAT == INT4) {
        const Words scales = step.scales(slot, step.shape->key_scales);
        return product * lower(scales) + pass.sums[i] * upper(scales);
    }
    if constexpr (Dot::FORMAT == INT4_CHANNEL) return product * pass.units[i] + pass.sums[i];
    if constexpr (is_scaled(Dot::FORMAT)) return product * as_floats(step.scales(slot, step.shape->key_scales));
    return product;
}

// products [Queries][STEP_KEYS]: `Vectors` vectors of keys from `first` on.
template <class Dot, int Queries, int Vectors>
inline void multiply_some_keys(const Step& step, const Queried<Dot>& pass, int first, Ahead& ahead, float* products) {
    typename Dot::Sum sums[Queries][Vectors] = {};
    const char* keys[Vectors];
    for (int v = 0; v < Vectors; ++v) {
        const int slot = (first + v) * LANES;
        keys[v] = step.keys[slot / TILE_SLOTS] + slot % TILE_SLOTS * WORD;
    }
    for (int index = 0; index < step.dim / Dot::GROUP; ++index) {
        ahead.step<LINES>();
        const char* at[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) at[v] = keys[v] + index * TILE_SLOTS * WORD;
        add_groups<Dot>(sums, at, pass.queries + Dot::GROUP * index, step.dim);
    }
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
        const int slot = (first + v) * LANES;
#pragma GCC unroll 6
        for (int i = 0; i < Queries; ++i)
            store(products + i * STEP_KEYS + slot, scale<Dot>(Dot::finish(sums[i][v]), step, slot, pass, i));
    }
}

// The first `vectors` vectors of keys, and perhaps one that follows them.
template <class Dot, int Queries>
inline void multiply_keys(const Step& step, const Queried<Dot>& pass, int vectors, Ahead& ahead, float* products) {
    int v = 0;
    for (; v + WIDE <= vectors; v += WIDE) multiply_some_keys<Dot, Queries, WIDE>(step, pass, v, ahead, products);
    for (; v < vectors; v += WIDE / 2) multiply_some_keys<Dot, Queries, WIDE / 2>(step, pass, v, ahead, products);
}

// The values of slots [from, to) of a step. Where they are not scaled, a pair of which only one slot counts lies at
// `edges`, the other one blanked: the first pair's copy, then the last one's.
struct Values {
    const Step* step;
    int from, to;
    const char* edges;
};

// A slot that nobody sees may hold NaN, which a weight of 0 would not silence. (Scaled elements are numbers always.)
template <class Dot>
inline const char* blank_edges(const Step& step, int from, int to, float* edges) {
    char* const copies = reinterpret_cast<char*>(edges);
    if constexpr (!is_scaled(Dot::FORMAT)) {
        constexpr int ELEMENT = WORD / Dot::GROUP;
        const int bytes = step.dim * WORD;
        const auto copy = [&](int pair, int kept, char* copy) {
            const char* const found = step.values(pair, Dot::GROUP);
            std::memset(copy, 0, bytes);
            for (int at = kept * ELEMENT; at < bytes; at += WORD) std::memcpy(copy + at, found + at, ELEMENT);
        };
        if (from % 2) copy(from / 2, 1, copies);
        if (to % 2) copy(to / 2, 0, copies + bytes);
    }
    return copies;
}

// Where the words of a group of slots lie.
template <class Dot>
inline const char* words_of(const Values& values, int index) {
    if constexpr (!is_scaled(Dot::FORMAT)) {
        if (2 * index + 1 == values.to) return values.edges + values.step->dim * WORD;
        if (2 * index < values.from) return values.edges;
    }
    return values.step->values(index, Dot::GROUP);
}

// `Vectors` vectors of dimensions from `column` on.
template <class Dot, int Queries, int Vectors>
inline void multiply_some_values(const Values& values, const typename Dot::Query* weights, const float* fades,
                                 const float* units, int column, Ahead& ahead, float* sums) {
    const int dim = values.step->dim;
    typename Dot::Sum found[Queries][Vectors] = {};
    float* const out = sums + column * LANES;
    if constexpr (!Dot::INTEGER) {
#pragma GCC unroll 6
        for (int i = 0; i < Queries; ++i)
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) found[i][v] = load<Floats>(out + i * dim + v * LANES) * fades[i];
    }
    for (int index = values.from / Dot::GROUP; index * Dot::GROUP < values.to; ++index) {
        ahead.step<LINES>();
        const char* const at = words_of<Dot>(values, index);
        const char* vectors[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) vectors[v] = at + (column + v) * LANES * WORD;
        add_groups<Dot>(found, vectors, weights + Dot::GROUP * index, STEP_KEYS);
    }
#pragma GCC unroll 6
    for (int i = 0; i < Queries; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) {
            float* const at = out + i * dim + v * LANES;
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
