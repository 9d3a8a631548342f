// The int8 register tile: R rows of quantized activations times W panels of 16 columns. It knows no threads, no bias and
// no rows beyond its own.
//
// A step is four values of k. With avx512_vnni the whole-number sums of a group of 32 stay in registers; after the group
// they are scaled and added to the fp32 sums, which the compiler keeps in what registers are left and on the stack: one
// addition after eight products, 0.89 of the peak at best. Without it the products are fp32, and exact. The fp32 sums run over the groups in order, the same in
// every tile.
#pragma once

#include "product.h"
#include "quantize.h"

namespace tg {

// Rows of groups; the same group of the next row lies `stride` groups further.
struct QuantRows {
    const QuantGroup* first;
    std::ptrdiff_t stride;
};

#if defined(__AVX512VNNI__)

// Four steps: products of four times four k of R rows from `numbers` on (those of the next row `row_bytes` further).
template <int R, int V>
inline __attribute__((always_inline)) void int8_steps(Ints (&sum)[R][V], const Quant* numbers, std::ptrdiff_t row_bytes,
                                                      const char* weights, std::ptrdiff_t step_bytes) {
#pragma GCC unroll 4
    for (int step = 0; step < 4; step++) {
        Words weight[V];
#pragma GCC unroll 3
        for (int v = 0; v < V; v++) weight[v] = load<Words>(weights + step * step_bytes + v * sizeof(Words));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Words four = splat(load<std::uint32_t>(numbers + r * row_bytes + step * 4));
#pragma GCC unroll 3
            for (int v = 0; v < V; v++)
                sum[r][v] = (Ints)_mm512_dpbusd_epi32((__m512i)sum[r][v], (__m512i)weight[v], (__m512i)four);
        }
    }
}

#else

// The same in fp32; `row_bytes` is in bytes here too.
template <int R, int V>
inline __attribute__((always_inline)) void int8_steps(Floats (&sum)[R][V], const Quant* numbers,
                                                      std::ptrdiff_t row_bytes, const char* weights,
                                                      std::ptrdiff_t step_bytes) {
    for (int step = 0; step < 4; step++, numbers += 4, weights += step_bytes)
#pragma GCC unroll 4
        for (int byte = 0; byte < 4; byte++) {
            asm("" : "+r"(weights));  // load the fours again rather than keep them: registers are short
            Floats weight[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                const Words four = load<Words>(weights + v * sizeof(Words));
                weight[v] = __builtin_convertvector((Ints)((four >> (8 * byte)) & 255u) - 128, Floats);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const char* const row = reinterpret_cast<const char*>(numbers + byte) + r * row_bytes;
                const Floats one = splat(load<float>(row));
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) sum[r][v] += one * weight[v];
            }
        }
}

#endif

// sums [R][W * 16] of R rows from `x` on, `stride` groups apart, and W panels that lie side by side in a tile of
// `width`.
template <int R, int W>
void int8_tile(const QuantGroup* x, std::ptrdiff_t stride, const char* weights, int width, std::int64_t groups,
               float* sums, Ahead& fetch) {
    constexpr int V = W * PARTS;
    const std::ptrdiff_t step_bytes = width * PANEL * 4, row_bytes = stride * sizeof(QuantGroup);
    Ahead ahead = fetch;  // in registers
    Floats all[R][V];
#pragma GCC unroll 24
    for (int i = 0; i < R * V; i++) all[i / V][i % V] = Floats{};

    for (std::int64_t group = 0; group < groups; group++, x++, weights += 8 * step_bytes) {
#if defined(__AVX512VNNI__)
        Ints sum[R][V];
#pragma GCC unroll 24
        for (int i = 0; i < R * V; i++) sum[i / V][i % V] = splat(x[i / V * stride].start);
#else
        Floats sum[R][V];
#pragma GCC unroll 24
        for (int i = 0; i < R * V; i++) sum[i / V][i % V] = Floats{};
#endif
        ahead.step();
        int8_steps<R, V>(sum, x->numbers, row_bytes, weights, step_bytes);
        ahead.step();
        int8_steps<R, V>(sum, x->numbers + GROUP / 2, row_bytes, weights + 4 * step_bytes, step_bytes);
#pragma GCC unroll 24
        for (int i = 0; i < R * V; i++)
            all[i / V][i % V] += __builtin_convertvector(sum[i / V][i % V], Floats) * x[i / V * stride].scale;
    }
#pragma GCC unroll 24
    for (int i = 0; i < R * V; i++) store(sums + i * LANES, all[i / V][i % V]);
    fetch = ahead;
}

}  // namespace tg
