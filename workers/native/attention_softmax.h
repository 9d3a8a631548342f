// Softmax of one step: products to weights relative to about the largest score so far, in powers of two (arXiv
// 1805.02867). A key that a query does not see weighs exactly 0, whatever its score.
//
// What weights are relative to is an integer, `top`, and it stays until a score exceeds it by SLACK: so sums are
// rarely rescaled, and then by a power of two, exactly. When it moves depends on the query's own scores alone.
#pragma once

#include "attention_products.h"

namespace tg {

constexpr float SLACK = 8.0f;
constexpr int STEP_VECTORS = STEP_KEYS / LANES;

// What the queries of a pass see of a step, and what becomes of their products.
struct Sight {
    int vectors;      // vectors of lanes that hold products
    bool partial;     // some query does not see some of these keys
    const int* from;  // per query: its first key, relative to the step
    const int* to;    // and the one after its last
    float cap;        // soft cap of scores, in powers of two; 0: none
    const Step* step;
};

// The running state of the queries of a pass, see Scratch.
struct Running {
    float* top;
    float* limit;
    float* weight;
    float* shift;
};

// Sums over a query's weights in each lane: of themselves, and of themselves times the values' lowest elements.
struct Weighed {
    Floats weight, shift;
};

inline Floats hide(Floats scores, const Sight& sight, int query, int vector) {
    const Ints key = lane_numbers() + vector * LANES;
    const Ints inside = (key >= splat(sight.from[query])) & (key < splat(sight.to[query]));
    return inside ? scores : splat(-INFINITE);
}

// Cap and mask a query's products in place; returns the largest of each lane. A capped product is a score.
inline Floats settle(float* products, float factor, const Sight& sight, int query) {
    Floats most = splat(-INFINITE);
    for (int v = 0; v < sight.vectors; ++v) {
        Floats score = load<Floats>(products + v * LANES);
        if (sight.cap != 0.0f) score = sight.cap * tanh_of(score * (factor / sight.cap));
        if (sight.partial) score = hide(score, sight, query, v);
        store(products + v * LANES, score);
        most = larger(score, most);
    }
    return most;
}

inline Floats largest_products(const float* products) {
    Floats most = load<Floats>(products);
#pragma GCC unroll 16
    for (int v = 1; v < STEP_VECTORS; ++v) most = larger(load<Floats>(products + v * LANES), most);
    return most;
}

// Move a query's top to where no score exceeds it; returns by how much what was summed before shrinks.
inline float raise_top(float most, float factor, float& top, float& limit) {
    const float before = top;
    top = __builtin_ceilf(most * factor);
    limit = (top + SLACK) / factor;
    return power_of_two(before - top);
}

#if defined(__AVX512BF16__)
// Weights in bf16, and their sum as rounded: so that rounding does not shift the mean.
inline void weigh_bf16(const float* products, int vectors, float factor, float top, Weighed& sums, std::uint16_t* out) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v += 2) {
        const Floats a = exp2_below<true>(load<Floats>(products + v * LANES), factor, top);
        Floats b{};
        if (v + 1 < vectors) b = exp2_below<true>(load<Floats>(products + (v + 1) * LANES), factor, top);
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        _mm512_storeu_si512(out + v * LANES, (__m512i)both);
        sums.weight = (Floats)_mm512_dpbf16_ps((__m512)sums.weight, both, (__m512bh)_mm512_set1_epi16(0x3f80));
    }
}
#endif

// A vector of weights times the scales of the values from `slot` on. A scale that nobody sees may be NaN.
template <class Dot>
inline Floats scaled(Floats weight, const Step& step, int slot, Weighed& sums) {
    if constexpr (!is_scaled(Dot::FORMAT)) return weight;
    const Words scales = step.scales(slot, step.shape->value_scales);
    const Ints unseen = weight == Floats{};
    if constexpr (Dot::FORMAT != INT4) return unseen ? Floats{} : weight * as_floats(scales);
    sums.shift = sums.shift + (unseen ? Floats{} : weight * upper(scales));
    return unseen ? Floats{} : weight * lower(scales);
}

// Weights in fp32, or rounded to bf16 where they are scaled: fp8's own rounding is 16 times as coarse.
template <class Dot, class To>
inline void weigh_fp32(const float* products, int vectors, float factor, float top, const Step& step, Weighed& sums,
                       To* out) {
    constexpr bool rough = Dot::INTEGER || Dot::ROUNDED;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
        const Floats weight = exp2_below<rough>(load<Floats>(products + v * LANES), factor, top);
        sums.weight = sums.weight + weight;
        const Floats found = scaled<Dot>(weight, step, v * LANES, sums);
        if constexpr (Dot::ROUNDED)
            store(out + v * LANES, to_bf16(found));
        else
            store(out + v * LANES, found);
    }
}

// Round weights to 16-bit integers of a common unit, which is returned; NaN where one is.
inline float quantise(const float* weights, int vectors, std::int16_t* out) {
    Words most{};  // as integers: none is negative, and NaN is above all
    for (int v = 0; v < vectors; ++v) {
        const Words bits = load<Words>(weights + v * LANES);
        most = bits > most ? bits : most;
    }
    const std::uint32_t bits = across(most, [](Words a, Words b) { return a > b ? a : b; });
    const float largest = load<float>(&bits), inverse = largest > 0.0f ? 32767.0f / largest : 0.0f;
    for (int v = 0; v < vectors; ++v) {
        const Ints whole = __builtin_convertvector(load<Floats>(weights + v * LANES) * inverse + 0.5f, Ints);
        store(out + v * LANES, __builtin_convertvector(whole, Shorts));
    }
    return largest * (1.0f / 32767.0f);
}

// A query's part of soften(). `whole`: all keys of the step are there and seen, and scores are not capped.
template <class Dot, bool whole>
inline void soften_query(float* products, float factor, const Sight& sight, int query, const Running& running,
                         float& fade, float& unit, typename Dot::Query* out) {
    const int vectors = whole ? STEP_VECTORS : sight.vectors;
    const Floats most = whole ? largest_products(products) : settle(products, factor, sight, query);
    if (!whole && sight.cap != 0.0f) factor = 1.0f;
    float& top = running.top[query];
    fade = 1.0f;
    if (any_above(most, running.limit[query])) fade = raise_top(greatest(most), factor, top, running.limit[query]);
    Weighed sums{load<Floats>(running.weight + query * LANES) * fade, {}};
    if constexpr (Dot::FORMAT == INT4) sums.shift = load<Floats>(running.shift + query * LANES) * fade;
    if constexpr (Dot::INTEGER) {
        weigh_fp32<Dot>(products, vectors, factor, top, *sight.step, sums, products);
        unit = quantise(products, vectors, out);
    } else {
#if defined(__AVX512BF16__)
        if constexpr (Dot::ROUNDED && !is_scaled(Dot::FORMAT))
            weigh_bf16(products, vectors, factor, top, sums, out);
        else
#endif
            weigh_fp32<Dot>(products, vectors, factor, top, *sight.step, sums, out);
    }
    store(running.weight + query * LANES, sums.weight);
    if constexpr (Dot::FORMAT == INT4) store(running.shift + query * LANES, sums.shift);
}

// One step of the online softmax for `count` queries: products [count][STEP_KEYS], each `factors` too small a score, to
// weights at `out`, likewise. `running` moves on; `fades`: by how much earlier sums shrink; `units` of integer weights.
template <class Dot>
void soften(int count, float* products, const float* factors, const Sight& sight, const Running& running, float* fades,
            float* units, typename Dot::Query* out) {
    const bool whole = sight.vectors == STEP_VECTORS && !sight.partial && sight.cap == 0.0f;
    for (int i = 0; i < count; ++i) {
        float* const from = products + i * STEP_KEYS;
        typename Dot::Query* const to = out + i * STEP_KEYS;
        if (whole)
            soften_query<Dot, true>(from, factors[i], sight, i, running, fades[i], units[i], to);
        else
            soften_query<Dot, false>(from, factors[i], sight, i, running, fades[i], units[i], to);
    }
}

}  // namespace tg
