// Page: where a head's keys and values lie in one block of the KV pool. It knows bytes, not who holds a block.
//
// A page is [heads][block_size / 16] tiles; a tile holds 16 slots of one head: keys, then values, then for int8 the
// 16 fp32 scales of the keys and the 16 of the values. Keys lie [head_dim / 2][16 slots][2], values [8 pairs of
// slots] [head_dim][2]: two neighbours of the summed dimension side by side, so that one instruction multiplies pairs
// and no sum runs across lanes. A tile begins at a multiple of 64 bytes where the page does.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tg {

constexpr int TILE_SLOTS = 16;

enum Format : std::int32_t { BF16 = 0, FP16 = 1, INT8 = 2 };

constexpr int element_bytes(std::int32_t format) { return format == INT8 ? 1 : 2; }

// Bytes of one tile, for heads of `dim` values, and where its parts begin: keys at 0.
struct TileShape {
    std::size_t values, scales, bytes;

    TileShape(std::int32_t format, int dim)
        : values(static_cast<std::size_t>(TILE_SLOTS) * dim * element_bytes(format)), scales(2 * values),
          bytes(scales + (format == INT8 ? 2 * TILE_SLOTS * sizeof(float) : 0)) {}

    std::size_t key_scale(int slot) const { return scales + slot * sizeof(float); }
    std::size_t value_scale(int slot) const { return scales + (TILE_SLOTS + slot) * sizeof(float); }
};

// Where dimension `d` of a slot lies among the keys, and among the values, of a tile, in elements.
constexpr int key_at(int slot, int d) { return d / 2 * 2 * TILE_SLOTS + 2 * slot + d % 2; }
constexpr int value_at(int slot, int d, int dim) { return slot / 2 * 2 * dim + 2 * d + slot % 2; }

}  // namespace tg
