// Activations as int8 in groups of 32 with one fp32 scale each: what a linear with int8 weights multiplies. It knows no
// weights and no threads.
#pragma once

#include <cstdint>

#include "simd.h"

namespace tg {

constexpr int GROUP = 32;

#if defined(__AVX512VNNI__)
typedef std::int8_t Quant;
#else
typedef float Quant;  // the same whole numbers: a group's sum stays below 2^24 and therefore exact
#endif

// A group is `scale` times its `numbers`. Weights are stored plus 128 (the instruction multiplies unsigned by signed), so
// a sum of products starts from -128 times the sum of the numbers.
struct QuantGroup {
    float scale;
    std::int32_t start;
    Quant numbers[GROUP];
};

// Groups of a row of `inputs` activations, the last one filled up with zeros; rows lie one after another.
inline std::int64_t quant_groups(std::int64_t inputs) { return (inputs + GROUP - 1) / GROUP; }

// LANES small numbers as whole ones, nearest, ties to even.
inline Ints rounded(Floats value) { return (Ints)as_words(value + 12582912.0f) - 0x4b400000; }

inline void store_quants(Quant* to, Ints numbers) {
#if defined(__AVX512VNNI__)
    typedef std::int8_t Bytes __attribute__((vector_size(LANES)));
    store(to, __builtin_convertvector(numbers, Bytes));
#else
    store(to, __builtin_convertvector(numbers, Floats));
#endif
}

// The greatest magnitude in a group of bf16. Without their signs floats are in the order of their bits, with infinity
// and then NaN above all numbers: a group that holds one gets it as its scale.
inline float group_peak(const std::uint16_t* x) {
    const auto larger = [](Ints a, Ints b) { return a > b ? a : b; };
    Ints peak{};
    for (int i = 0; i < GROUP; i += 2 * LANES) {
        const Words pair = load<Words>(x + i);
        peak = larger(peak, larger((Ints)((pair << 16) & 0x7fffffffu), (Ints)(pair & 0x7fff0000u)));
    }
    const std::int32_t bits = across(peak, larger);
    float found;
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

inline void quantize_group(const std::uint16_t* x, QuantGroup& group) {
    const float peak = group_peak(x);
    const float inverse = peak > 1e-30f ? 127.0f / peak : 0.0f;
    group.scale = peak * (1.0f / 127.0f);
    Ints sum{};
    for (int i = 0; i < GROUP; i += LANES) {
        const Ints numbers = rounded(from_bf16(x + i) * inverse);
        store_quants(group.numbers + i, numbers);
        sum += numbers;
    }
    group.start = -128 * total(sum);
}

inline void quantize_row(const std::uint16_t* x, std::int64_t inputs, QuantGroup* groups) {
    const std::int64_t whole = inputs / GROUP, left = inputs % GROUP;
    for (std::int64_t group = 0; group < whole; group++) quantize_group(x + group * GROUP, groups[group]);
    if (left) {
        std::uint16_t tail[GROUP] = {};
        std::memcpy(tail, x + whole * GROUP, static_cast<std::size_t>(left) * sizeof *tail);
        quantize_group(tail, groups[whole]);
    }
}

}  // namespace tg
