// Layer: what one call works on. The kernels of each pair of formats are a shared object of their own, which is
// compiled when a layer keeps its keys and values so.
#pragma once

#include "attention.h"

namespace tg {

// The row that a token belongs to.
inline const Row& row_of(const tg_attention& work, int token) {
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

// Python's part of it mirrors this field by field.
struct Layer {
    const tg_attention* work;
    // Of this layer's pair of formats, see attention_pair.cpp.
    void (*cache)(const Layer& layer, int first, int stop);
    void (*attend)(const Layer& layer, int rank);
    char* page;  // the layer's part of the pool
    std::int64_t page_bytes;
    std::uint16_t* heads;  // bf16 [tokens][stride]: queries, keys and values side by side
    std::int64_t stride;
    const float* turns;  // cosine and sine, [tokens][head_dim], or null
    std::uint16_t* out;  // bf16 [tokens][q_heads * head_dim]
    const float* sinks;  // per query head the score of a key without a value, or null
    float scale;         // of the product of query and key
    float soft_cap;      // scores s become soft_cap * tanh(s / soft_cap); 0: as they are
};

}  // namespace tg
