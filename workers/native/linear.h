// A linear layer as the C side sees it: where its packed weights lie and what happens to a product. No kernels here.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// All of this is mirrored by workers/native/linear.py. Weights lie in tiles of `width` panels of 16 columns, see pack.cpp; a gated
// linear has a tile of the gate, then the same columns of up, and so on. `bias` and `scale` are fp32, one per packed
// column in the weights' order, or null.
struct TgLinear {
    const void* weight;
    const float* bias;
    const float* scale;
    std::int64_t inputs;
    std::int64_t outputs;
    std::int32_t width;
    std::int32_t finish;
};

// One call of `part`: x, bf16 [rows, part->inputs] with rows `x_stride` elements apart, into `out`, whose rows are
// `out_stride` elements of its own type apart: fp32 for WIDE and ADD, else bf16. `scratch` has tg_linear_scratch()
// bytes per row.
struct TgProduct {
    const TgLinear* part;
    const std::uint16_t* x;
    std::int64_t x_stride;
    std::int64_t rows;
    void* out;
    std::int64_t out_stride;
    void* scratch;
};
}

namespace tg {

// What becomes of a product: stored as bf16, stored as fp32, added to an fp32 stream; or, for a gated linear,
// activation(gate) * up stored as bf16.
enum Finish : std::int32_t { NARROW = 0, WIDE = 1, ADD = 2, SILU = 3, GELU_TANH = 4, GELU = 5 };

constexpr int PANEL = 16;       // columns that lie next to each other for one pair or quad of k
constexpr int MOST_PANELS = 3;  // in a tile
constexpr int LINE = 64;        // bytes of a cache line

// What Python has checked already; a wrong struct is a wrong layout of it.
inline bool is_sound(const TgProduct& call) {
    const TgLinear& part = *call.part;
    return call.rows > 0 && part.inputs > 0 && part.outputs > 0 && part.width >= 1 && part.width <= MOST_PANELS &&
           part.finish >= NARROW && part.finish <= GELU && call.out_stride >= part.outputs;
}

inline bool is_gated(const TgLinear& part) { return part.finish >= SILU; }

// Tiles that together give one stretch of output columns.
inline int parts_of(const TgLinear& part) { return is_gated(part) ? 2 : 1; }

inline std::int64_t ceil_div(std::int64_t count, std::int64_t by) { return (count + by - 1) / by; }

}  // namespace tg
