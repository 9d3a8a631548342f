// Page: where a head's keys and values lie in one block of the KV pool. It knows bytes, not who holds a block.
//
// A page is [heads][block_size / 16] tiles; a tile holds 16 slots of one head: keys, then values, then where a format
// has scales the 16 of the keys and the 16 of the values. Keys and values lie in words of 32 bits: a word holds
// neighbours of the summed dimension, as many as fit (a group), so that one instruction multiplies pairs of them and no
// sum runs across lanes. Keys are words [head_dim / group][16 slots], values [16 slots / group][head_dim]. A tile
// begins at a multiple of 64 bytes where the page does.
//
// A scale is a word too: an fp32 factor, for INT4 two bf16: the step in the lower half, the lowest value in the upper.
// Keys of INT4_CHANNEL have such words per dimension, behind the tiles of a head.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tg {

constexpr int TILE_SLOTS = 16;
constexpr int WORD = 4;  // bytes
constexpr int HALVES = 2;  // of a block with open keys, see attention_open.h

enum Format : std::int32_t { BF16 = 0, FP16 = 1, INT8 = 2, FP8_E4M3 = 3, FP8_E5M2 = 4, INT4 = 5, INT4_CHANNEL = 6 };

// Elements of a word.
constexpr int group_of(Format format) {
    return format == INT4 || format == INT4_CHANNEL ? 8 : format == BF16 || format == FP16 ? 2 : 4;
}

// Whether a slot has a scale.
constexpr bool is_scaled(Format format) { return format != BF16 && format != FP16 && format != INT4_CHANNEL; }

// Where in its word the element `index` of a group lies: the halves of a word hold the even and the odd ones, so that
// the two of a pair come out of one shift.
constexpr int place_of(int group, int index) { return index / 2 + index % 2 * (group / 2); }

// Bytes of one tile, for heads of `dim` values, and where its parts begin: keys at 0. `channels`: of what lies behind
// the tiles of a head.
struct TileShape {
    std::size_t values, key_scales, value_scales, bytes, channels;

    TileShape(Format key, Format value, int dim)
        : values(static_cast<std::size_t>(TILE_SLOTS) * dim / group_of(key) * WORD),
          key_scales(values + static_cast<std::size_t>(TILE_SLOTS) * dim / group_of(value) * WORD),
          value_scales(key_scales + (is_scaled(key) ? TILE_SLOTS * WORD : 0)),
          bytes(value_scales + (is_scaled(value) ? TILE_SLOTS * WORD : 0)),
          channels(key == INT4_CHANNEL ? static_cast<std::size_t>(dim) * WORD : 0) {}

    // Of all that a head has in a block of `tiles` tiles.
    std::size_t head_bytes(int tiles) const { return tiles * bytes + channels; }
};

// In which word dimension `d` of a slot lies among the keys, and among the values, of a tile.
constexpr int key_word(Format format, int slot, int d) { return d / group_of(format) * TILE_SLOTS + slot; }
constexpr int value_word(Format format, int slot, int d, int dim) { return slot / group_of(format) * dim + d; }

}  // namespace tg
