// Weights [rows, columns] of any 16- or 32-bit float format → the tiles that a product walks through.
//
// A tile holds the weights of width * 16 output columns (rows of the matrix here) for all k. bf16: [k / 2][width][16][2],
// so that a vector holds pairs of k for 16 outputs. int8: [k / 4][width][16][4], as what one scale per output makes of
// the weights, plus 128. k is filled up with zeros to a pair or a group, outputs to whole tiles.
#include <algorithm>
#include <cmath>
#include <vector>

#include "linear.h"
#include "quantize.h"
#include "team.h"

namespace {

using namespace tg;

enum Source : std::int32_t { FP32 = 0, BF16 = 1, FP16 = 2 };

// `count` weights of one row as fp32; `to` has room for whole vectors.
void widen(const char* from, std::int32_t source, std::int64_t count, float* to) {
    if (source == FP32) {
        std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
        return;
    }
    const auto* halves = reinterpret_cast<const std::uint16_t*>(from);
    for (std::int64_t i = 0; i < count; i += LANES) {
        std::uint16_t some[LANES] = {};
        const std::int64_t left = count - i < LANES ? count - i : LANES;
        std::memcpy(some, halves + i, static_cast<std::size_t>(left) * sizeof(std::uint16_t));
        store(to + i, source == BF16 ? from_bf16(some) : from_fp16(some));
    }
}

// `count` weights of one row as bf16, two to a word.
void narrow(const char* from, std::int32_t source, std::int64_t count, float* wide, std::uint16_t* to) {
    if (source == BF16) {
        std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(std::uint16_t));
    } else {
        widen(from, source, count, wide);
        for (std::int64_t i = 0; i < count; i += LANES) store(to + i, to_bf16(load(wide + i)));
    }
    to[count] = 0;
}

}  // namespace

extern "C" {

// Rows of `weight`, `stride_bytes` apart, into every `every`-th tile of `out` from tile `first` on, as bf16.
int tg_pack_bf16(const char* weight, std::int32_t source, std::int64_t stride_bytes, std::int64_t rows,
                 std::int64_t columns, std::int32_t width, std::int64_t first, std::int64_t every, char* out) {
    const std::int64_t pairs = ceil_div(columns, 2), panels = ceil_div(rows, width * PANEL) * width;
    const std::int64_t tile_words = pairs * width * PANEL;
    in_team(false, [&](int rank, int size) {
        std::vector<float> wide(static_cast<std::size_t>(columns + LANES));
        std::vector<std::uint16_t> row(static_cast<std::size_t>(columns + LANES + 1));
        for (std::int64_t panel = share_begin(panels, rank, size); panel < share_begin(panels, rank + 1, size); panel++) {
            const std::int64_t tile = first + panel / width * every;
            auto* words = reinterpret_cast<std::uint32_t*>(out) + tile * tile_words + panel % width * PANEL;
            for (int column = 0; column < PANEL; column++) {
                const std::int64_t index = panel * PANEL + column;
                std::uint32_t* to = words + column;
                if (index >= rows) {
                    for (std::int64_t pair = 0; pair < pairs; pair++) to[pair * width * PANEL] = 0;
                    continue;
                }
                narrow(weight + index * stride_bytes, source, columns, wide.data(), row.data());
                for (std::int64_t pair = 0; pair < pairs; pair++)
                    std::memcpy(to + pair * width * PANEL, row.data() + 2 * pair, 4);
            }
        }
    });
    return 0;
}

// The same as int8 plus 128; `scales` gets one value per packed column.
int tg_pack_int8(const char* weight, std::int32_t source, std::int64_t stride_bytes, std::int64_t rows,
                 std::int64_t columns, std::int32_t width, std::int64_t first, std::int64_t every, char* out,
                 float* scales) {
    const std::int64_t filled = quant_groups(columns) * GROUP, panels = ceil_div(rows, width * PANEL) * width;
    const std::int64_t tile_bytes = filled * width * PANEL;
    in_team(false, [&](int rank, int size) {
        std::vector<float> wide(static_cast<std::size_t>(filled + LANES));
        for (std::int64_t panel = share_begin(panels, rank, size); panel < share_begin(panels, rank + 1, size); panel++) {
            const std::int64_t tile = first + panel / width * every;
            char* const quads = out + tile * tile_bytes + panel % width * PANEL * 4;
            for (int column = 0; column < PANEL; column++) {
                const std::int64_t index = panel * PANEL + column;
                std::fill(wide.begin(), wide.end(), 0.0f);
                if (index < rows) widen(weight + index * stride_bytes, source, columns, wide.data());
                float peak = 0;
                for (std::int64_t k = 0; k < columns; k++) peak = std::max(peak, std::fabs(wide[k]));
                scales[(tile * width + panel % width) * PANEL + column] = peak / 127.0f;
                const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
                for (std::int64_t k = 0; k < filled; k += 4) {
                    char* const to = quads + k * width * PANEL + column * 4;
                    for (int i = 0; i < 4; i++) {
                        const float number = std::nearbyint((k + i < columns ? wide[k + i] : 0.0f) * inverse);
                        to[i] = static_cast<char>(static_cast<int>(number) + 128);
                    }
                }
            }
        }
    });
    return 0;
}
}
