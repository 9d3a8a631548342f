// Tiles: where in the pool the keys of a row lie, through its block table. A block before a row's window may be gone:
// it is neither read nor fetched ahead. It knows no format.
#pragma once

#include "attention_ahead.h"
#include "attention_layer.h"
#include "attention_open.h"
#include "attention_page.h"
#include "attention_totals.h"

namespace tg {

// Where the first step of a unit begins that has keys of partition `part` or a later one.
inline int first_step(const Place& place, int part) {
    const int seen = place.first_seen(place.position(0)) / STEP_KEYS * STEP_KEYS;
    return at_least(part * PARTITION_KEYS, seen);
}

class Tiles {
  public:
    Tiles(const Layer& layer, const TileShape& shape)
        : layer_(layer), work_(*layer.work), bytes_(shape.bytes), channels_(shape.channels),
          per_block_(work_.block_size / TILE_SLOTS), head_bytes_(shape.head_bytes(per_block_)) {}

    // The tiles of the keys [base, base + keys) of the unit's head that some query of it sees, and the first of those
    // in place of the others.
    void find(const Place& place, int base, int keys, const char** tiles) const {
        const int first = unseen(place, base), stop = (keys + TILE_SLOTS - 1) / TILE_SLOTS;
        const int index = base / TILE_SLOTS + first;
        const std::int32_t* block = work_.tables + place.row.table + index / per_block_;
        int within = index % per_block_;
        for (int i = first; i < stop; ++i) {
            tiles[i] = tile(*block, place.unit.head, within);
            if (++within < per_block_) continue;
            within = 0;
            ++block;
        }
        for (int i = 0; i < first; ++i) tiles[i] = tiles[first];
        for (int i = stop; i < STEP_KEYS / TILE_SLOTS; ++i) tiles[i] = tiles[first];
    }

    // Keys by channel of the step at `base`, all of one block: the scales of those that are sealed; null, with `tiles`
    // set to the open ones in bf16, where that block is the queries' own.
    const char* find_channels(const Place& place, int base, int keys, const char** tiles) const {
        const int block = base / work_.block_size, index = base % work_.block_size / TILE_SLOTS;
        if (block != place.position(0) / work_.block_size)
            return tile(work_.tables[place.row.table + block], place.unit.head, per_block_);
        const int stop = (keys + TILE_SLOTS - 1) / TILE_SLOTS;
        for (int i = 0; i < STEP_KEYS / TILE_SLOTS; ++i)
            tiles[i] = open_tile(layer_, place.row, block, place.unit.head, index + at_most(i, stop - 1));
        return nullptr;
    }

    // Ask for the step that comes after the one at `base`: this unit's, else the next one's first.
    void fetch_after(const Place& place, int base, int last, const Unit* next, Ahead& ahead) const {
        if (base + STEP_KEYS < last) return fetch(place, base + STEP_KEYS, last, ahead);
        if (!next) return;
        const Place after(work_, *next);
        fetch(after, first_step(after, next->part), after.position(next->count - 1) + 1, ahead);
    }

  private:
    // How many tiles of the step at `base` lie before what any query sees.
    static int unseen(const Place& place, int base) {
        return at_least(0, place.first_seen(place.position(0)) - base) / TILE_SLOTS;
    }

    void fetch(const Place& place, int base, int end, Ahead& ahead) const {
        const char* tiles[STEP_KEYS / TILE_SLOTS];
        const int keys = at_most(STEP_KEYS, end - base);
        find(place, base, keys, tiles);
        const int first = unseen(place, base);
        ahead.begin(tiles + first, (keys + TILE_SLOTS - 1) / TILE_SLOTS - first, bytes_);
        if (!channels_) return;
        const std::int32_t block = work_.tables[place.row.table + (base / TILE_SLOTS + first) / per_block_];
        const char* const scales = tile(block, place.unit.head, per_block_);
        for (std::size_t at = 0; at < channels_; at += Ahead::LINE) __builtin_prefetch(scales + at, 0, 2);
    }

    // Tile `index` of a head; behind the last one, what its channels have.
    const char* tile(std::int64_t block, int head, int index) const {
#if defined(TG_CHECKS)
        if (block < 0 || block >= work_.blocks) __builtin_trap();
#endif
        return layer_.page + block * layer_.page_bytes + head * static_cast<std::int64_t>(head_bytes_) +
               index * static_cast<std::int64_t>(bytes_);
    }

    const Layer& layer_;
    const tg_attention& work_;
    const std::size_t bytes_, channels_;
    const int per_block_;
    const std::size_t head_bytes_;
};

}  // namespace tg
