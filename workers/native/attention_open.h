// Open: keys by channel, before and as they are sealed. Those of a block that is not full lie in bf16 in two blocks of
// the pool, one for each half of its tokens: [heads][block_size / 32] tiles of keys, as a tile of bf16 begins. With its
// last token a block is sealed: the keys of a channel get a common step and lowest value, as
// workers/attention/formats.py says. It knows no query.
#pragma once

#include "attention_encode.h"
#include "attention_lanes.h"
#include "attention_layer.h"
#include "attention_page.h"

namespace tg {

inline std::int64_t open_tile_bytes(int dim) { return static_cast<std::int64_t>(TILE_SLOTS) * dim * 2; }

// Tile `index` of the open keys of block `place` of a row.
inline char* open_tile(const Layer& layer, const Row& row, int place, int head, int index) {
    const tg_attention& work = *layer.work;
    const int per_half = work.block_size / TILE_SLOTS / HALVES;
    const std::int64_t block = work.opened[index / per_half][row.table + place];
#if defined(TG_CHECKS)
    if (block < 0 || block >= work.blocks) __builtin_trap();
#endif
    return layer.page + block * layer.page_bytes + (head * per_half + index % per_half) * open_tile_bytes(work.head_dim);
}

// A head's keys in one block: `tiles` open ones, the first half of them from halves[0] on.
struct OpenBlock {
    const char* halves[HALVES];
    int tiles, dim;

    // The words of LANES slots of tile `index` from `slot` on: channels 2 * pair and 2 * pair + 1.
    Words words(int index, int slot, int pair) const {
        const int per_half = tiles / HALVES;
        const char* const tile = halves[index / per_half] + index % per_half * open_tile_bytes(dim);
        return load<Words>(tile + (pair * TILE_SLOTS + slot) * WORD);
    }
};

struct Extremes {
    Floats low = splat(INFINITE), high = splat(-INFINITE), odd{};  // odd: not 0 where something is no number

    void take(Floats x) {
        low = choose(x < low, x, low);
        high = choose(x > high, x, high);
        odd = odd + x * 0.0f;
    }

    Scaling scaling() const {
        if (!(total(odd) == 0.0f)) return {0.0f, 0.0f, 0x7fc07fc0};
        return int4_scaling(-greatest(-low), greatest(high));
    }
};

// How LANES elements of a channel are counted.
inline Words counts(Floats x, const Scaling& scaling) {
    if (scaling.inverse == 0.0f) return Words{};
    const Floats steps = at_most(at_least((x - scaling.lowest) * scaling.inverse, Floats{}), splat(15.0f));
    return as_words(steps + ROUNDING) & 15u;
}

// Write the keys of a head's block to its tiles, `bytes` apart from `to` on, and the channels' scales to `scales`.
inline void seal_head(const OpenBlock& open, char* to, std::size_t bytes, char* scales) {
    constexpr int GROUP = group_of(INT4_CHANNEL), PAIRS = GROUP / 2;
    for (int group = 0; group < open.dim / GROUP; ++group) {
        Scaling found[GROUP];
        for (int pair = 0; pair < PAIRS; ++pair) {
            Extremes even, odd;
            for (int tile = 0; tile < open.tiles; ++tile)
                for (int slot = 0; slot < TILE_SLOTS; slot += LANES) {
                    const Words words = open.words(tile, slot, group * PAIRS + pair);
                    even.take(lower(words));
                    odd.take(upper(words));
                }
            found[2 * pair] = even.scaling();
            found[2 * pair + 1] = odd.scaling();
        }
        for (int i = 0; i < GROUP; ++i) store(scales + (group * GROUP + i) * WORD, found[i].scale);
        for (int tile = 0; tile < open.tiles; ++tile)
            for (int slot = 0; slot < TILE_SLOTS; slot += LANES) {
                Words word{};
                for (int pair = 0; pair < PAIRS; ++pair) {
                    const Words words = open.words(tile, slot, group * PAIRS + pair);
                    word |= counts(lower(words), found[2 * pair]) << 4 * place_of(GROUP, 2 * pair);
                    word |= counts(upper(words), found[2 * pair + 1]) << 4 * place_of(GROUP, 2 * pair + 1);
                }
                store(to + tile * bytes + (group * TILE_SLOTS + slot) * WORD, word);
            }
    }
}

// A token's rotated key of one head, x [dim], in slot `slot` of the open keys of block `place`.
inline void store_open(const Layer& layer, const Row& row, int place, int head, int slot, const float* x) {
    char* const tile = open_tile(layer, row, place, head, slot / TILE_SLOTS);
    for (int d = 0; d < layer.work->head_dim; ++d)
        store(tile + key_word(BF16, slot % TILE_SLOTS, d) * WORD + d % 2 * 2, to_bf16(x[d]));
}

// A head's keys of block `place` of a row, which is full, into the tiles that begin at `to`.
inline void seal(const Layer& layer, const Row& row, int place, int head, const TileShape& shape, char* to) {
    const tg_attention& work = *layer.work;
    const int tiles = work.block_size / TILE_SLOTS;
    OpenBlock open{{}, tiles, work.head_dim};
    for (int half = 0; half < HALVES; ++half) open.halves[half] = open_tile(layer, row, place, head, half * tiles / HALVES);
    seal_head(open, to, shape.bytes, to + tiles * shape.bytes);
}

// A query of fp32 as it multiplies sealed keys: times the channels' steps. Its products, times `unit`, are too small by
// `shift`.
template <class Dot>
inline void fold_query(const float* query, const char* scales, int dim, typename Dot::Query* to, float& unit,
                       float& shift) {
    float x[MOST_DIM];
    Floats most{}, moved{};
    for (int d = 0; d < dim; d += LANES) {
        const Words scale = load<Words>(scales + d * WORD);
        const Floats from = load<Floats>(query + d), found = from * lower(scale);
        moved = moved + from * upper(scale);
        most = larger(magnitude(found), most);
        store(x + d, found);
    }
    shift = total(moved);
    unit = 1.0f;
    if constexpr (Dot::INTEGER) {
        const float largest = greatest(most) > 1e-30f ? greatest(most) : 1e-30f;
        for (int d = 0; d < dim; d += LANES) {
            const Ints whole = (Ints)as_words(load<Floats>(x + d) * (32767.0f / largest) + ROUNDING) - 0x4b400000;
            store(to + d, __builtin_convertvector(whole, Shorts));
        }
        unit = largest / 32767.0f;
    } else {
        std::memcpy(to, x, dim * sizeof *to);
    }
}

}  // namespace tg
