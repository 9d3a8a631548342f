// Attention of one layer and one step: rotates queries and keys, stores keys and values, then attends over each row's
// own slots, all in one call and one team of threads. It knows no format.
#include "attention_layer.h"
#include "attention_page.h"
#include "team.h"

namespace {

using tg::Row;

// Below that one thread is done before a second one would have begun.
constexpr std::int64_t SMALL = 4096;

// Where the tokens of thread `rank` out of `size` begin: no two threads write to the same tile, nor, where keys are by
// channel, to the same block.
int first_token(const tg_attention& work, int rank, int size) {
    const int token = static_cast<int>(tg::share_begin(work.tokens, rank, size));
    if (token == work.tokens) return token;
    const Row& row = tg::row_of(work, token);
    const int grain = work.opened[0] ? work.block_size : tg::TILE_SLOTS;
    const int into_row = token - row.first, into_tile = (row.start + into_row) % grain;
    return token - (into_tile < into_row ? into_tile : into_row);
}

}  // namespace

extern "C" {

// A Layer.
int tg_attention(const void* arguments) {
    const tg::Layer& layer = *static_cast<const tg::Layer*>(arguments);
    const auto* const work = layer.work;
    for (std::int64_t i = 0; i < work->unit_count; ++i)
        if (work->units[i].part >= 0) work->pending[work->units[i].merge] = work->units[i].parts;
    work->pending[work->merge_count] = 0;
    tg::in_team(work->cost < SMALL, [&](int rank, int size) {
        layer.cache(layer, first_token(*work, rank, size), first_token(*work, rank + 1, size));
        tg::meet(size);
        if (rank < work->threads) layer.attend(layer, rank);
    });
    return 0;
}
}
