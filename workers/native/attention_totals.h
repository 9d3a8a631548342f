// Totals: a unit's sums over all its partitions, and where they go. Partitions are added in order, each with its own
// top, by factors that are powers of two; so who computed a partition changes no bit. It knows no key and no value.
#pragma once

#include "attention_scratch.h"

namespace tg {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float NOTHING = -1e30f;  // the top of no keys: finite, so that differences are numbers

// The first position that a token at `position` sees.
inline int first_seen(const tg_attention& work, int position) {
    return work.window > 0 ? at_least(0, position + 1 - work.window) : 0;
}

// A unit among the rows and heads of its step.
struct Place {
    const tg_attention* work;
    Unit unit;
    Row row;
    int ratio;  // query heads of a KV head

    Place(const tg_attention& of, const Unit& which)
        : work(&of), unit(which), row(of.rows[which.row]), ratio(of.q_heads / of.kv_heads) {}

    int token(int query) const { return (unit.first + query) / ratio; }
    int position(int query) const { return row.start + token(query); }

    int head(int query) const { return unit.head * ratio + (unit.first + query) % ratio; }

    // Where a query begins in a tensor of `stride` elements per token.
    std::int64_t offset(int query, std::int64_t stride) const {
        return (row.first + token(query)) * stride + static_cast<std::int64_t>(head(query)) * work->head_dim;
    }

    int first_seen(int position) const { return tg::first_seen(*work, position); }

    // What partition `part` leaves: sums [count][dim], weights [count], tops [count].
    float* partial(int part) const {
        const std::int64_t vectors = unit.piece + static_cast<std::int64_t>(part - unit.first_part) * unit.count;
        return work->partials + vectors * (work->head_dim + 2);
    }
};

inline void fill(float* at, int count, float value) {
    for (int i = 0; i < count; ++i) at[i] = value;
}

inline void begin_totals(const Scratch& scratch, const Place& place) {
    fill(scratch.total, place.unit.count * place.work->head_dim, 0.0f);
    fill(scratch.total_weight, place.unit.count, 0.0f);
    fill(scratch.total_top, place.unit.count, NOTHING);
}

// Add one partition's sums with their weights and tops.
inline void add_partition(const Scratch& scratch, const Place& place, const float* sums, const float* weight,
                          const float* top) {
    const int dim = place.work->head_dim;
    for (int i = 0; i < place.unit.count; ++i) {
        const float highest = top[i] > scratch.total_top[i] ? top[i] : scratch.total_top[i];
        const float old = power_of_two(scratch.total_top[i] - highest), fresh = power_of_two(top[i] - highest);
        scratch.total_top[i] = highest;
        scratch.total_weight[i] = scratch.total_weight[i] * old + weight[i] * fresh;
        for (int d = 0; d < dim; d += LANES) {
            float* const at = scratch.total + i * dim + d;
            store(at, load<Floats>(at) * old + load<Floats>(sums + i * dim + d) * fresh);
        }
    }
}

// Add to every element of a query's sums what its values' lowest elements come to.
inline void add_shifts(const Scratch& scratch, const Place& place) {
    const int dim = place.work->head_dim;
    for (int i = 0; i < place.unit.count; ++i) {
        const float shift = total(load<Floats>(scratch.shift + i * LANES));
        for (int d = 0; d < dim; d += LANES) {
            float* const at = scratch.sums + i * dim + d;
            store(at, load<Floats>(at) + shift);
        }
    }
}

// weight [count] from weight [count][LANES], in place.
inline void sum_lanes(const Scratch& scratch, int count) {
    for (int i = 0; i < count; ++i) scratch.weight[i] = total(load<Floats>(scratch.weight + i * LANES));
}

// This partition's sums, to their place among the partial ones or into the totals.
inline void end_partition(const Scratch& scratch, const Place& place) {
    const int count = place.unit.count, size = count * place.work->head_dim;
    sum_lanes(scratch, count);
    if (place.unit.part < 0) return add_partition(scratch, place, scratch.sums, scratch.weight, scratch.top);
    float* const to = place.partial(place.unit.part);
    std::memcpy(to, scratch.sums, size * sizeof(float));
    std::memcpy(to + size, scratch.weight, count * sizeof(float));
    std::memcpy(to + size + count, scratch.top, count * sizeof(float));
}

// One over all weights, relative to `top`. They include the sink of a query head that has one: a score that takes its
// share and gives no value (arXiv 2309.17453).
inline float inverse_weight(float weight, float top, const float* sink) {
    if (!sink) return 1.0f / weight;
    const float score = *sink * LOG2_E, above = __builtin_ceilf(score), highest = above > top ? above : top;
    const float keys = power_of_two(top - highest), alone = __builtin_exp2f(score - highest);
    return keys / (weight * keys + alone);
}

// Sums over weights in bf16, to their queries' places in `out` [tokens][q_heads * dim].
inline void give_means(const float* sums, const float* weight, const float* top, const Place& place,
                       const float* sinks, std::uint16_t* out) {
    const int dim = place.work->head_dim;
    for (int i = 0; i < place.unit.count; ++i) {
        std::uint16_t* const to = out + place.offset(i, static_cast<std::int64_t>(place.work->q_heads) * dim);
        const float inverse = inverse_weight(weight[i], top[i], sinks ? sinks + place.head(i) : nullptr);
        for (int d = 0; d < dim; d += LANES) store(to + d, to_bf16(load<Floats>(sums + i * dim + d) * inverse));
    }
}

// Add up what the parts of a cut unit have left, in order.
inline void merge_parts(const Scratch& scratch, const Place& place, const float* sinks, std::uint16_t* out) {
    const int count = place.unit.count, size = count * place.work->head_dim;
    begin_totals(scratch, place);
    for (int part = place.unit.first_part; part < place.unit.first_part + place.unit.parts; ++part) {
        const float* const from = place.partial(part);
        add_partition(scratch, place, from, from + size, from + size + count);
    }
    give_means(scratch.total, scratch.total_weight, scratch.total_top, place, sinks, out);
}

}  // namespace tg
