// What attention of one step is: the shapes, the rows, and how their work is cut into units. It computes nothing.
#pragma once

#include <cstdint>

namespace tg {

constexpr int STEP_KEYS = 64;        // keys whose weights are relative to the same score
constexpr int PARTITION_KEYS = 512;  // keys whose sums are kept apart and then added in order
constexpr int UNIT_QUERIES = 48;     // query vectors that share a pass over the keys of a head

// One sequence's tokens in this step: `count` from index `first` on, at positions start, start + 1, ...; its blocks
// are the step's tables from `table` on, -1 in place of those that none of its tokens sees any more.
struct Row {
    std::int32_t first, count, start, table;
};

// Query vectors [first, first + count) of a row and a KV head; they are numbered token by token, and within a token
// by query head. part -1: over all keys. Else over partition `part` alone, one of `parts` from `first_part` on: of
// their units the one that ends last, as pending[merge] tells, adds up what they left in the partial sums from piece
// * (head_dim + 2) floats on.
struct Unit {
    std::int32_t row, head, first, count;
    std::int32_t part, first_part, parts;
    std::int32_t piece, merge;
};

}  // namespace tg

extern "C" {

// Python's part of it mirrors this field by field.
struct tg_attention {
    // The pool and the model.
    std::int32_t q_heads, kv_heads, head_dim, block_size, blocks;
    std::int32_t window;  // positions that a token sees, its own included; 0: all
    // The step.
    std::int32_t tokens, row_count, table_count;
    const tg::Row* rows;
    const std::int32_t* tables;
    const std::int32_t* opened[2];  // like `tables`: the blocks with either half of the open keys, or null
    // What tg_attention_plan() fills, in memory of Python's: so much there is, and so much is needed.
    tg::Unit* units;
    float* partials;
    std::int32_t* pending;  // per merge, and one more: the next unit to take
    char* scratch;          // of each thread
    std::int64_t unit_room, partial_room, scratch_room;  // units (and pending, one more), floats, bytes
    std::int64_t unit_count, partial_count, scratch_count;
    std::int32_t merge_count, threads;
    std::int64_t cost;  // of all units together, in multiplications of a query and a key
};
}
