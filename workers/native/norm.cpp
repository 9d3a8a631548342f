// RMSNorm of rows of the fp32 residual stream, of what is about to be added to it, and of single heads in place. arXiv 1910.07467.
//
// A row is one thread's work and its sum of squares has one order, so its bits depend on its own values alone.
#include <cmath>

#include "simd.h"
#include "team.h"

namespace {

using namespace tg;

constexpr std::int64_t SPLIT = 16384;  // values from which on a second thread pays

// Four chains hide the latency of an addition.
template <class Value, class Load>
float square_sum(const Value* x, std::int64_t count, Load load_some) {
    Floats chain[4] = {};
    std::int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int c = 0; c < 4; c++) {
            const Floats value = load_some(x + i + c * LANES);
            chain[c] += value * value;
        }
    for (; i + LANES <= count; i += LANES) {
        const Floats value = load_some(x + i);
        chain[0] += value * value;
    }
    float sum = total((chain[0] + chain[1]) + (chain[2] + chain[3]));
    for (; i < count; i++) {
        Value lanes[LANES] = {x[i]};
        float first[LANES];
        store(first, load_some(lanes));
        sum += first[0] * first[0];
    }
    return sum;
}

Floats load_fp32(const float* from) { return load(from); }
Floats load_bf16(const std::uint16_t* from) { return from_bf16(from); }

inline float factor(float squares, std::int64_t count, float eps) {
    return 1.0f / std::sqrt(squares / static_cast<float>(count) + eps);
}

void norm_row(const float* x, std::int64_t count, const float* weight, float eps, std::uint16_t* out) {
    const float scale = factor(square_sum(x, count, load_fp32), count, eps);
    std::int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, to_bf16(load(x + i) * scale * load(weight + i)));
    for (; i < count; i++) out[i] = to_bf16(x[i] * scale * weight[i]);
}

void norm_row_onto(const float* x, std::int64_t count, const float* weight, float eps, float* stream) {
    const float scale = factor(square_sum(x, count, load_fp32), count, eps);
    std::int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        store(stream + i, load(stream + i) + load(x + i) * scale * load(weight + i));
    for (; i < count; i++) stream[i] += x[i] * scale * weight[i];
}

void norm_head(std::uint16_t* x, std::int64_t count, const float* weight, float eps) {
    const float scale = factor(square_sum(x, count, load_bf16), count, eps);
    std::int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(x + i, to_bf16(from_bf16(x + i) * scale * load(weight + i)));
    for (; i < count; i++) x[i] = to_bf16(from_bf16(x[i]) * scale * weight[i]);
}

}  // namespace

extern "C" {

// x fp32 [rows, count] → out bf16 [rows, count], both contiguous; weight fp32 [count]. Mirrored by norm.py.
struct TgNorm {
    const float* x;
    std::int64_t rows;
    std::int64_t count;
    const float* weight;
    std::uint16_t* out;
    float eps;
};

int tg_norm(const void* arguments) {
    const auto* const call = static_cast<const TgNorm*>(arguments);
    const std::int64_t rows = call->rows, count = call->count;
    in_team(rows * count <= SPLIT, [&](int rank, int size) {
        for (std::int64_t row = share_begin(rows, rank, size); row < share_begin(rows, rank + 1, size); row++)
            norm_row(call->x + row * count, count, call->weight, call->eps, call->out + row * count);
    });
    return 0;
}

// What tg_norm makes of x, in fp32, added to stream fp32 [rows, count], contiguous. Mirrored by norm.py.
struct TgNormOnto {
    const float* x;
    std::int64_t rows;
    std::int64_t count;
    const float* weight;
    float* stream;
    float eps;
};

int tg_norm_onto(const void* arguments) {
    const auto* const call = static_cast<const TgNormOnto*>(arguments);
    const std::int64_t rows = call->rows, count = call->count;
    in_team(rows * count <= SPLIT, [&](int rank, int size) {
        for (std::int64_t row = share_begin(rows, rank, size); row < share_begin(rows, rank + 1, size); row++)
            norm_row_onto(call->x + row * count, count, call->weight, call->eps, call->stream + row * count);
    });
    return 0;
}

// The first heads * count columns of x, bf16 with rows `stride` elements apart, head by head in place; weight fp32
// [heads, count]. Mirrored by norm.py.
struct TgHeadNorm {
    std::uint16_t* x;
    std::int64_t stride;
    std::int64_t rows;
    std::int64_t heads;
    std::int64_t count;
    const float* weight;
    float eps;
};

int tg_head_norm(const void* arguments) {
    const auto* const call = static_cast<const TgHeadNorm*>(arguments);
    const std::int64_t rows = call->rows, heads = call->heads, count = call->count;
    in_team(rows * heads * count <= SPLIT, [&](int rank, int size) {
        for (std::int64_t row = share_begin(rows, rank, size); row < share_begin(rows, rank + 1, size); row++)
            for (std::int64_t head = 0; head < heads; head++)
                norm_head(call->x + row * call->stride + head * count, count, call->weight + head * count, call->eps);
    });
    return 0;
}
}
