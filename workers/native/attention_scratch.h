// Scratch: one thread's working memory for a unit. It knows sizes only.
#pragma once

#include "attention.h"
#include "attention_lanes.h"

namespace tg {

// What the inner kernels take at most in a pass: query vectors times vectors of lanes, whose sums stay in registers
// beside the operands of one turn.
#if defined(__AVX512F__)
constexpr int PASS_QUERIES = 6, WIDE = 4;  // of 32 registers
#elif defined(__AVX2__)
constexpr int PASS_QUERIES = 6, WIDE = 2;  // of 16 registers
#else
constexpr int PASS_QUERIES = 4, WIDE = 2;
#endif

struct Scratch {
    std::int32_t* position;  // [UNIT_QUERIES]: in the sequence
    float* queries;          // [UNIT_QUERIES][dim], or as many 16-bit elements
    float* query_sum;        // [UNIT_QUERIES]: of a query's elements
    float* factor;           // [UNIT_QUERIES]: times a product it is a score in powers of two
    // Of this partition:
    float* sums;    // [UNIT_QUERIES][dim]: values times weights
    float* weight;  // [UNIT_QUERIES][LANES]: weights
    float* shift;   // [UNIT_QUERIES][LANES]: weights times values' lowest elements, where those are kept apart
    float* top;     // [UNIT_QUERIES]: what the weights are relative to, see attention_softmax.h
    float* limit;   // [UNIT_QUERIES]: the largest product that leaves it as it is
    // Of all partitions so far:
    float* total;         // [UNIT_QUERIES][dim]
    float* total_weight;  // [UNIT_QUERIES]
    float* total_top;     // [UNIT_QUERIES]
    // Of this pass:
    float* scores;  // [PASS_QUERIES][STEP_KEYS]
    float* shares;  // [PASS_QUERIES][STEP_KEYS]: weights in the format that multiplies values
    float* edges;   // [2][dim]: pairs of values of which one is blanked
    float* folded;  // [PASS_QUERIES][dim]: queries as keys by channel are multiplied with them,
    float* units;   // [PASS_QUERIES]: by how much their products are too small
    float* shifts;  // [PASS_QUERIES]: and what is added to those

    static std::size_t bytes(int dim) { return Scratch(nullptr, dim).end_; }

    Scratch(char* at, int dim) : at_(at) {
        const int vectors = UNIT_QUERIES * dim;
        position = reinterpret_cast<std::int32_t*>(take(UNIT_QUERIES));
        queries = take(vectors);
        query_sum = take(UNIT_QUERIES);
        factor = take(UNIT_QUERIES);
        sums = take(vectors);
        weight = take(UNIT_QUERIES * LANES);
        shift = take(UNIT_QUERIES * LANES);
        top = take(UNIT_QUERIES);
        limit = take(UNIT_QUERIES);
        total = take(vectors);
        total_weight = take(UNIT_QUERIES);
        total_top = take(UNIT_QUERIES);
        scores = take(PASS_QUERIES * STEP_KEYS);
        shares = take(PASS_QUERIES * STEP_KEYS);
        edges = take(2 * dim);
        folded = take(PASS_QUERIES * dim);
        units = take(PASS_QUERIES);
        shifts = take(PASS_QUERIES);
    }

  private:
    float* take(int floats) {
        char* const found = at_ ? at_ + end_ : nullptr;
        end_ += (floats * sizeof(float) + 63) / 64 * 64;
        return reinterpret_cast<float*>(found);
    }

    char* at_;
    std::size_t end_ = 0;
};

}  // namespace tg
