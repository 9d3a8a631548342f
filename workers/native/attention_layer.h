// Layer: what one call works on, and the loop in which a team of threads takes its units. Each format's kernels are
// compiled in a file of their own, which the compiler does side by side.
#pragma once

#include "attention.h"

namespace tg {

// Python's part of it mirrors this field by field.
struct Layer {
    const tg_attention* work;
    char* page;            // the layer's part of the pool
    std::int64_t page_bytes, format;
    std::uint16_t* heads;  // bf16 [tokens][stride]: queries, keys and values side by side
    std::int64_t stride;
    const float* turns;  // cosine and sine, [tokens][head_dim], or null
    std::uint16_t* out;  // bf16 [tokens][q_heads * head_dim]
};

// Take units until there are none left, as thread `rank` of those that the plan counted on.
void attend_bf16(const Layer& layer, int rank);
void attend_fp16(const Layer& layer, int rank);
void attend_int8(const Layer& layer, int rank);

}  // namespace tg
