// Linears with bf16 weights: activations bf16, sums fp32. See product.h for the walk and gemm_tile.h for the tile.
#include "gemm_tile.h"
#include "team.h"

namespace {

using namespace tg;

typedef void (*Kernel)(const Cell*, std::ptrdiff_t, const char*, int, std::int64_t, float*, Ahead&);

template <int R, int W>
constexpr Kernel kernel() {
    if constexpr (R <= TILE_ROWS && fits(R, W)) return bf16_tile<R, W>;
    return nullptr;
}

// [rows - 1][panels - 1]; empty where the registers do not hold it.
constexpr Kernel KERNELS[8][MOST_PANELS] = {
    {kernel<1, 1>(), kernel<1, 2>(), kernel<1, 3>()}, {kernel<2, 1>(), kernel<2, 2>(), kernel<2, 3>()},
    {kernel<3, 1>(), kernel<3, 2>(), kernel<3, 3>()}, {kernel<4, 1>(), kernel<4, 2>(), kernel<4, 3>()},
    {kernel<5, 1>(), kernel<5, 2>(), kernel<5, 3>()}, {kernel<6, 1>(), kernel<6, 2>(), kernel<6, 3>()},
    {kernel<7, 1>(), kernel<7, 2>(), kernel<7, 3>()}, {kernel<8, 1>(), kernel<8, 2>(), kernel<8, 3>()},
};

struct Bf16 {
    struct Rows {
        const Cell* cells;
        std::ptrdiff_t stride;
    };
    static constexpr int ROWS = TILE_ROWS;

    static std::int64_t tile_bytes(const TgLinear& part) { return ceil_div(part.inputs, 2) * part.width * PANEL * 4; }

    static std::int64_t fetches(const TgLinear& part) { return part.inputs < 8 ? 1 : part.inputs / 8; }

    // One row tile takes the weights straight from memory. With few rows the processor's own prefetch is the best
    // there is; with many it does not reach far enough.
    static Ahead stream(const char* weights, int rows, std::int64_t lines) {
        return {weights + 16384, rows > 4 ? lines : 0};
    }

    static void tile(const Rows& x, std::int64_t first, int rows, const char* weights, const TgLinear& part,
                     float* sums, Ahead& ahead) {
        compute_tile(KERNELS, x.cells + first * x.stride, x.stride, rows, weights, part.width, part.inputs, sums, ahead);
    }
};

#if !defined(__AVX512BF16__)
// Row `row` of x, widened.
void widen(const std::uint16_t* from, std::int64_t count, float* to) {
    std::int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, from_bf16(from + i));
    for (; i < count; i++) to[i] = from_bf16(from[i]);
}
#endif

}  // namespace

extern "C" {

// Bytes of scratch per row of `inputs` columns that tg_linear() wants; the answer is the return value.
int tg_linear_scratch(std::int64_t inputs) {
#if defined(__AVX512BF16__)
    (void)inputs;
    return 0;
#else
    return static_cast<int>(inputs * static_cast<std::int64_t>(sizeof(float)));
#endif
}

int tg_linear(const void* arguments) {
    const auto* const call = static_cast<const TgProduct*>(arguments);
    if (!is_sound(*call)) return 1;
    const Cut cut(*call, Bf16::ROWS, threads());
    Shares shares(cut.jobs(), threads());
    in_team(false, [&](int rank, int size) {
#if defined(__AVX512BF16__)
        (void)size;
        const Bf16::Rows cells{call->x, call->x_stride};
#else
        const std::int64_t inputs = call->part->inputs, end = share_begin(call->rows, rank + 1, size);
        float* const wide = static_cast<float*>(call->scratch);
        for (std::int64_t row = share_begin(call->rows, rank, size); row < end; row++)
            widen(call->x + row * call->x_stride, inputs, wide + row * inputs);
        meet(size);
        const Bf16::Rows cells{wide, inputs};
#endif
        multiply<Bf16>(*call, cells, cut, shares, rank);
    });
    return 0;
}
}
