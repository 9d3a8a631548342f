// Linears with int8 weights, one scale per output, and activations that are quantized here, in groups of 32. Sums are
// fp32 over exact sums of groups. See product.h for the walk and gemm_int8_tile.h for the tile.
#include "gemm_int8_tile.h"
#include "team.h"

namespace {

using namespace tg;

typedef void (*Kernel)(const QuantGroup*, std::ptrdiff_t, const char*, int, std::int64_t, float*, Ahead&);

template <int R, int W>
constexpr Kernel kernel() {
    if constexpr (R <= TILE_ROWS && fits(R, W)) return int8_tile<R, W>;
    return nullptr;
}

// [rows - 1][panels - 1]; empty where the registers do not hold it.
constexpr Kernel KERNELS[5][MOST_PANELS] = {
    {kernel<1, 1>(), kernel<1, 2>(), kernel<1, 3>()}, {kernel<2, 1>(), kernel<2, 2>(), kernel<2, 3>()},
    {kernel<3, 1>(), kernel<3, 2>(), kernel<3, 3>()}, {kernel<4, 1>(), kernel<4, 2>(), kernel<4, 3>()},
    {kernel<5, 1>(), kernel<5, 2>(), kernel<5, 3>()},
};

struct Int8 {
    using Rows = QuantRows;
    // With more rows the change from one group to the next takes longer than the smaller tile's loads.
    static constexpr int ROWS = TILE_ROWS < 5 ? TILE_ROWS : 5;

    static std::int64_t tile_bytes(const TgLinear& part) {
        return quant_groups(part.inputs) * GROUP * part.width * PANEL;
    }

    static std::int64_t fetches(const TgLinear& part) { return quant_groups(part.inputs) * 2; }

    static Ahead stream(const char* weights, int rows, std::int64_t lines) {
        return {weights + 16384, rows > 4 ? lines : 0};
    }

    static void tile(const Rows& x, std::int64_t first, int rows, const char* weights, const TgLinear& part,
                     float* sums, Ahead& ahead) {
        compute_tile(KERNELS, x.first + first * x.stride, x.stride, rows, weights, part.width,
                     quant_groups(part.inputs), sums, ahead);
    }
};

}  // namespace

extern "C" {

// Bytes of scratch per row of `inputs` columns that tg_linear_int8() wants; the answer is the return value.
int tg_linear_int8_scratch(std::int64_t inputs) {
    return static_cast<int>(quant_groups(inputs) * static_cast<std::int64_t>(sizeof(QuantGroup)));
}

int tg_linear_int8(const void* arguments) {
    const auto* const call = static_cast<const TgProduct*>(arguments);
    if (!is_sound(*call) || !call->part->scale) return 1;
    const std::int64_t inputs = call->part->inputs, groups = quant_groups(inputs);
    auto* const quantized = static_cast<QuantGroup*>(call->scratch);
    const Cut cut(*call, Int8::ROWS, threads());
    Shares shares(cut.jobs(), threads());
    in_team(false, [&](int rank, int size) {
        const std::int64_t end = share_begin(call->rows, rank + 1, size);
        for (std::int64_t row = share_begin(call->rows, rank, size); row < end; row++)
            quantize_row(call->x + row * call->x_stride, inputs, quantized + row * groups);
        meet(size);
        multiply<Int8>(*call, {quantized, groups}, cut, shares, rank);
    });
    return 0;
}
}
