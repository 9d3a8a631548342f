// The walk of one product through its weights: which thread takes which tiles of columns for which rows, in tiles of
// how many rows, and what is fetched from memory meanwhile. What a tile computes is its format's business.
//
// A thread keeps one unit of weights (a tile; gate and up together when gated) in its second-level cache and takes all
// rows through it, while the next unit comes in from memory bit by bit. A sum runs over k in one order whatever the
// shape of the tile, so neither the number of rows nor of threads shows in a row's bits.
#pragma once

#include "epilogue.h"
#include "shares.h"

namespace tg {

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 8, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 6, REGISTERS = 16;
#else
constexpr int TILE_ROWS = 2, REGISTERS = 16;
#endif
constexpr int PARTS = PANEL / LANES;  // vectors of a panel

// Whether the sums of R rows and W panels, a step's weights and two more vectors fit the registers; one panel always
// goes.
constexpr bool fits(int rows, int panels) { return panels == 1 || (rows + 1) * panels * PARTS + 2 <= REGISTERS; }

// Lines to fetch into the second-level cache: `lines` of them every four steps of a kernel.
struct Ahead {
    const char* from;
    std::int64_t lines;

    inline void step() {
        for (std::int64_t line = 0; line < lines; line++) __builtin_prefetch(from + line * LINE, 0, 2);
        from += lines * LINE;
    }
};

// sums [rows][width * 16] of one tile of weights. kernels[rows - 1][panels - 1] computes so many panels at once; where
// the registers do not hold all of them (null) it goes panel by panel.
template <class Kernel, class Cells>
void compute_tile(const Kernel (*kernels)[MOST_PANELS], const Cells* x, std::ptrdiff_t stride, int rows,
                  const char* weights, int width, std::int64_t depth, float* sums, Ahead& ahead) {
    if (const Kernel whole = kernels[rows - 1][width - 1]) return whole(x, stride, weights, width, depth, sums, ahead);
    Ahead nothing{weights, 0};
    for (int panel = 0; panel < width; panel++) {
        float own[TILE_ROWS * PANEL];
        kernels[rows - 1][0](x, stride, weights + panel * PANEL * 4, width, depth, own, panel ? nothing : ahead);
        for (int row = 0; row < rows; row++)
            std::memcpy(sums + (row * width + panel) * PANEL, own + row * PANEL, PANEL * sizeof(float));
    }
}

// `rows` rows in row tiles of at most `most`, as even as can be.
struct RowTiles {
    std::int64_t rows;
    std::int64_t count;

    RowTiles(std::int64_t rows, int most) : rows(rows), count(ceil_div(rows, most)) {}
    std::int64_t first(std::int64_t index) const { return rows * index / count; }
    int size(std::int64_t index) const { return static_cast<int>(first(index + 1) - first(index)); }
};

// How a product is cut into jobs for a team of `size`: columns, as many as a tile has, and for few of those and many
// threads rows as well, into blocks of at least four row tiles.
struct Cut {
    std::int64_t units, blocks = 1;

    Cut(const TgProduct& call, int most_rows, int size)
        : units(ceil_div(call.part->outputs, call.part->width * PANEL)) {
        const std::int64_t tiles = RowTiles(call.rows, most_rows).count;
        while (units * blocks < 3 * size && tiles >= 8 * blocks) blocks *= 2;
    }
    std::int64_t jobs() const { return units * blocks; }
};

// What thread `rank` takes of `call`, whose rows `x` are as the format wants them. Format gives Rows,
// ROWS (most rows of a tile), tile_bytes(), fetches() (times that a kernel fetches ahead), stream() (what it fetches
// when there is but one row tile) and tile().
template <class Format>
void multiply(const TgProduct& call, const typename Format::Rows& x, const Cut& cut, Shares& shares, int rank) {
    const TgLinear& part = *call.part;
    const int parts = parts_of(part);
    const std::int64_t columns = part.width * PANEL;
    const std::int64_t units = cut.units, blocks = cut.blocks;
    const std::int64_t tile_bytes = Format::tile_bytes(part), unit_bytes = tile_bytes * parts;
    const RowTiles tiles(call.rows, Format::ROWS);
    char* const out = static_cast<char*>(call.out);
    const std::ptrdiff_t out_bytes = call.out_stride * (part.finish == WIDE || part.finish == ADD ? 4 : 2);
    alignas(LINE) float sums[2 * Format::ROWS * MOST_PANELS * PANEL];
    bool next = false;
    for (std::int64_t job; (job = shares.take(rank, next)) >= 0;) {
        const std::int64_t block = job / units, unit = job % units;
        const std::int64_t from = tiles.count * block / blocks, to = tiles.count * (block + 1) / blocks;
        const char* weights = static_cast<const char*>(part.weight) + unit * unit_bytes;
        const float* shift = part.bias ? part.bias + unit * columns * parts : nullptr;
        const float* scale = part.scale ? part.scale + unit * columns * parts : nullptr;
        const bool more = next && unit + 1 < units;
        const std::int64_t lines = ceil_div(unit_bytes, LINE * Format::fetches(part) * parts * (to - from));
        Ahead ahead{weights + unit_bytes, more && to - from > 1 ? lines : 0};
        for (std::int64_t tile = from; tile < to; tile++) {
            const int count = tiles.size(tile);
            if (to - from == 1) ahead = Format::stream(weights, count, lines);
            for (int index = 0; index < parts; index++) {
                float* sum = sums + index * count * columns;
                Format::tile(x, tiles.first(tile), count, weights + index * tile_bytes, part, sum, ahead);
            }
            char* target = out + tiles.first(tile) * out_bytes;
            finish_tile(part, sums, count, shift, scale, unit * columns, target, out_bytes);
        }
    }
}

}  // namespace tg
