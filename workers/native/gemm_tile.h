// The bf16 register tile: R rows of activations times W panels of 16 columns, sums in registers over all of k. It knows
// no threads, no bias and no rows beyond its own.
//
// A step is one pair of k. With avx512_bf16 it loads W vectors of weights, then per row broadcasts a pair of
// activations and issues W vdpbf16ps: 8 x 3 sums, 3 weights and a broadcast live in registers, and 24 products pay for
// 11 loads. Without it activations come as fp32, the weights' halves are widened in registers, and each pair is two
// fused multiply-adds. Each sum is one chain over k in order, the same in every tile.
#pragma once

#include "product.h"

namespace tg {

#if defined(__AVX512BF16__)
typedef std::uint16_t Cell;  // activations as they come
#else
typedef float Cell;  // activations widened once per call
#endif

// sums [R][W * 16] of R rows from `x` on (`stride` cells apart) and W panels that lie side by side in a tile of `width`.
template <int R, int W>
void bf16_tile(const Cell* x, std::ptrdiff_t stride, const char* weights, int width, std::int64_t inputs, float* sums,
               Ahead& ahead) {
    constexpr int V = W * PARTS;
    const std::ptrdiff_t step_bytes = width * PANEL * 4;
    Floats sum[R][V];
#pragma GCC unroll 24
    for (int i = 0; i < R * V; i++) sum[i / V][i % V] = Floats{};

    const auto pair = [&](const Cell* x, const char* w) __attribute__((always_inline)) {
#if defined(__AVX512BF16__)
        Words weight[V];
#pragma GCC unroll 12
        for (int v = 0; v < V; v++) weight[v] = load<Words>(w + v * sizeof(Words));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Words both = splat(load<std::uint32_t>(x + r * stride));
#pragma GCC unroll 12
            for (int v = 0; v < V; v++) sum[r][v] = dot_pairs(sum[r][v], both, weight[v]);
        }
#else
        // One half of the pairs after the other: its widened weights, then row by row a broadcast.
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            asm("" : "+r"(w));  // load the pairs again rather than keep them: registers are short
            Floats weight[V];
#pragma GCC unroll 12
            for (int v = 0; v < V; v++) {
                const Words both = load<Words>(w + v * sizeof(Words));
                weight[v] = half ? upper(both) : lower(both);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Floats one = splat(x[r * stride + half]);
#pragma GCC unroll 12
                for (int v = 0; v < V; v++) sum[r][v] += one * weight[v];
            }
        }
#endif
    };

    std::int64_t left = inputs;
    for (; left >= 8; left -= 8, x += 8, weights += 4 * step_bytes) {
        ahead.step();
        pair(x, weights);
        pair(x + 2, weights + step_bytes);
        pair(x + 4, weights + 2 * step_bytes);
        pair(x + 6, weights + 3 * step_bytes);
    }
    for (; left >= 2; left -= 2, x += 2, weights += step_bytes) pair(x, weights);
    if (left) {  // an odd k: its partner is a zero, here and in the weights
        Cell last[R][2];
        for (int r = 0; r < R; r++) {
            last[r][0] = x[r * stride];
            last[r][1] = 0;
        }
        stride = 2;
        pair(&last[0][0], weights);
    }
#pragma GCC unroll 24
    for (int i = 0; i < R * V; i++) store(sums + i * LANES, sum[i / V][i % V]);
}

}  // namespace tg
