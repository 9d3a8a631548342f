// Attention of one layer and one step: rotates queries and keys, stores keys and values, then attends over each row's
// own slots, all in one call and one team of threads.
#include "attention_cache.h"
#include "attention_layer.h"
#include "team.h"

namespace {

using tg::Layer;
using tg::Row;

// Below that one thread is done before a second one would have begun.
constexpr std::int64_t SMALL = 4096;

// The row that a token belongs to.
const Row& row_of(const tg_attention& work, int token) {
    int low = 0, high = work.row_count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (work.rows[middle].first <= token)
            low = middle;
        else
            high = middle - 1;
    }
    return work.rows[low];
}

// Rotate and store all heads of a token.
void cache(const Layer& layer, int token) {
    const tg_attention& work = *layer.work;
    const int dim = work.head_dim;
    const auto format = static_cast<std::int32_t>(layer.format);
    std::uint16_t* const heads = layer.heads + token * layer.stride;
    const float* const turns = layer.turns ? layer.turns + static_cast<std::int64_t>(token) * dim : nullptr;
    if (turns)
        for (int head = 0; head < work.q_heads; ++head) tg::turn_query(heads + head * dim, turns, dim);
    const Row& row = row_of(work, token);
    const int position = row.start + token - row.first, offset = position % work.block_size;
    const std::int64_t block = work.tables[row.table + position / work.block_size];
    const std::size_t tile_bytes = tg::TileShape(format, dim).bytes;
    char* tile = layer.page + block * layer.page_bytes + offset / tg::TILE_SLOTS * tile_bytes;
    const std::uint16_t* key = heads + work.q_heads * dim;
    for (int head = 0; head < work.kv_heads; ++head) {
        tg::cache_token(key, key + work.kv_heads * dim, turns, dim, format, offset % tg::TILE_SLOTS, tile);
        key += dim;
        tile += work.block_size / tg::TILE_SLOTS * tile_bytes;
    }
}

void attend(const Layer& layer, int rank) {
    switch (layer.format) {
        case tg::BF16: return tg::attend_bf16(layer, rank);
        case tg::FP16: return tg::attend_fp16(layer, rank);
        default: return tg::attend_int8(layer, rank);
    }
}

}  // namespace

extern "C" {

// A Layer.
int tg_attention(const void* arguments) {
    const Layer& layer = *static_cast<const Layer*>(arguments);
    const auto* const work = layer.work;
    for (std::int64_t i = 0; i < work->unit_count; ++i)
        if (work->units[i].part >= 0) work->pending[work->units[i].merge] = work->units[i].parts;
    work->pending[work->merge_count] = 0;
    tg::in_team(work->cost < SMALL, [&](int rank, int size) {
        const int begin = static_cast<int>(tg::share_begin(work->tokens, rank, size));
        const int end = static_cast<int>(tg::share_begin(work->tokens, rank + 1, size));
        for (int token = begin; token < end; ++token) cache(layer, token);
        tg::meet(size);
        if (rank < work->threads) attend(layer, rank);
    });
    return 0;
}
}
