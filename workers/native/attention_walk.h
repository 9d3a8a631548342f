// Walk: one thread's way over the keys of a unit, partition by partition, step by step. It knows no threads, and
// formats only through their Dots.
#pragma once

#include "attention_cache.h"
#include "attention_layer.h"
#include "attention_products.h"
#include "attention_softmax.h"
#include "attention_tiles.h"
#include "attention_totals.h"

namespace tg {

template <Format keys, Format values>
class Walk {
  public:
    Walk(const Layer& layer, const Scratch& scratch)
        : layer_(layer), work_(*layer.work), scratch_(scratch), shape_(keys, values, work_.head_dim),
          tiles_(layer, shape_), dim_(work_.head_dim) {}

    // Attend for `unit`: to its queries' places, or to its own in the partial sums. `next`, or null, is the unit that
    // comes after it, whose first keys are fetched ahead.
    void run(const Unit& unit, const Unit* next) {
        const Place place(work_, unit);
        take_queries(place);
        const int last = scratch_.position[unit.count - 1] + 1;
        if (unit.part >= 0) {
            attend(place, unit.part, at_most((unit.part + 1) * PARTITION_KEYS, last), next);
            return end_partition(scratch_, place);
        }
        if (unit.parts == 1) {
            attend(place, unit.first_part, last, next);
            sum_lanes(scratch_, unit.count);  // and no totals: 0 + x is x, to the bit
            return give_means(scratch_.sums, scratch_.weight, scratch_.top, place, layer_.sinks, layer_.out);
        }
        begin_totals(scratch_, place);
        for (int part = unit.first_part; part < unit.first_part + unit.parts; ++part) {
            attend(place, part, last, next);
            end_partition(scratch_, place);
        }
        give_means(scratch_.total, scratch_.total_weight, scratch_.total_top, place, layer_.sinks, layer_.out);
    }

  private:
    using KeyDot = typename Chosen<keys>::Dot;
    using ValueDot = typename Chosen<values>::Dot;
    using Query = typename KeyDot::Query;
    using Weight = typename ValueDot::Query;
    static constexpr int PASS = at_most(KeyDot::PASS, ValueDot::PASS);
    static constexpr bool CHANNELS = keys == INT4_CHANNEL;
    using OpenDot = typename Chosen<BF16>::Dot;

    void take_queries(const Place& place) {
        for (int i = 0; i < place.unit.count; ++i) {
            scratch_.position[i] = place.position(i);
            if constexpr (CHANNELS) {
                const std::uint16_t* const from = layer_.heads + place.offset(i, layer_.stride);
                for (int d = 0; d < dim_; d += LANES) store(scratch_.queries + i * dim_ + d, from_bf16(from + d));
                scratch_.factor[i] = layer_.scale * LOG2_E;
                continue;
            }
            Query* const to = reinterpret_cast<Query*>(scratch_.queries) + i * dim_;
            scratch_.factor[i] = layer_.scale * LOG2_E *
                                 take_query<KeyDot>(layer_.heads + place.offset(i, layer_.stride), to, dim_);
            if constexpr (keys == INT4) scratch_.query_sum[i] = sum_of(to, dim_);
        }
    }

    // One partition's sums over the keys below `last` (which may lie behind it).
    void attend(const Place& place, int part, int last, const Unit* next) {
        fill(scratch_.sums, place.unit.count * dim_, 0.0f);
        fill(scratch_.weight, place.unit.count * LANES, 0.0f);
        fill(scratch_.shift, place.unit.count * LANES, 0.0f);
        fill(scratch_.top, place.unit.count, NOTHING);
        fill(scratch_.limit, place.unit.count, -INFINITE);
        const int end = at_most((part + 1) * PARTITION_KEYS, last);
        for (int base = first_step(place, part); base < end; base += STEP_KEYS) {
            Step step{{}, {}, nullptr, &shape_, dim_, base};
            const int keys_left = at_most(STEP_KEYS, end - base);
            tiles_.find(place, base, keys_left, step.tiles);
            std::memcpy(step.keys, step.tiles, sizeof step.keys);
            if constexpr (CHANNELS) step.channels = tiles_.find_channels(place, base, keys_left, step.keys);
            tiles_.fetch_after(place, base, last, next, ahead_);
            advance(place, step);
            ahead_.finish();
        }
        if constexpr (values == INT4) add_shifts(scratch_, place);
    }

    // All queries of the unit, a few at a time.
    void advance(const Place& place, const Step& step) {
        int count = 0;
        for (int first = 0; first < place.unit.count; first += count) {
            count = pass_of(place.unit.count - first, PASS);
            const std::int32_t* const positions = scratch_.position + first;
            if (positions[count - 1] < step.base) continue;
            if (place.first_seen(positions[0]) >= step.base + STEP_KEYS) continue;
            switch (count) {
                case 1: advance_pass<1>(place, step, first); break;
                case 2: advance_pass<2>(place, step, first); break;
                case 3: if constexpr (PASS >= 3) advance_pass<3>(place, step, first); break;
                case 4: if constexpr (PASS >= 4) advance_pass<4>(place, step, first); break;
                case 6: if constexpr (PASS >= 6) advance_pass<6>(place, step, first); break;
                default: break;
            }
        }
    }

    template <int Queries>
    void advance_pass(const Place& place, const Step& step, int first) {
        constexpr int WHOLE = at_least(LANES, ValueDot::GROUP);  // there is a weight for every slot of a group
        int from[Queries], to[Queries];
        float fades[Queries], units[Queries];
        for (int i = 0; i < Queries; ++i) {
            const int position = scratch_.position[first + i];
            from[i] = at_least(0, place.first_seen(position) - step.base);
            to[i] = at_most(STEP_KEYS, position + 1 - step.base);
        }
        const int begin = from[0], end = to[Queries - 1], vectors = (end + WHOLE - 1) / WHOLE * (WHOLE / LANES);
        const bool partial = from[Queries - 1] > 0 || to[0] < vectors * LANES;
        const Sight sight{vectors, partial, from, to, layer_.soft_cap * LOG2_E, &step};
        const Running running{scratch_.top + first, scratch_.limit + first, scratch_.weight + first * LANES,
                              scratch_.shift + first * LANES};
        Weight* const weights = reinterpret_cast<Weight*>(scratch_.shares);
        if constexpr (CHANNELS) {
            multiply_channels<Queries>(step, first, vectors);
        } else {
            const Queried<KeyDot> pass{reinterpret_cast<const Query*>(scratch_.queries) + first * dim_,
                                       scratch_.query_sum + first, nullptr};
            multiply_keys<KeyDot, Queries>(step, pass, vectors, ahead_, scratch_.scores);
        }
        soften<ValueDot>(Queries, scratch_.scores, scratch_.factor + first, sight, running, fades, units, weights);
        const Values seen{&step, begin, end, blank_edges<ValueDot>(step, begin, end, scratch_.edges)};
        multiply_values<ValueDot, Queries>(seen, weights, fades, units, ahead_, scratch_.sums + first * dim_);
    }

    // Keys by channel: sealed ones with queries that their scales are folded into, open ones as they are.
    template <int Queries>
    void multiply_channels(const Step& step, int first, int vectors) {
        const float* const from = scratch_.queries + first * dim_;
        if (step.channels) {
            Query* const folded = reinterpret_cast<Query*>(scratch_.folded);
            for (int i = 0; i < Queries; ++i)
                fold_query<KeyDot>(from + i * dim_, step.channels, dim_, folded + i * dim_, scratch_.units[i],
                                   scratch_.shifts[i]);
            multiply_keys<KeyDot, Queries>(step, {folded, scratch_.shifts, scratch_.units}, vectors, ahead_,
                                           scratch_.scores);
        } else {
            using Plain = typename OpenDot::Query;
            Plain* const plain = reinterpret_cast<Plain*>(scratch_.folded);
            for (int d = 0; d < Queries * dim_; d += LANES) {
                if constexpr (OpenDot::ROUNDED)
                    store(plain + d, to_bf16(load<Floats>(from + d)));  // exact: they were bf16
                else
                    store(plain + d, load<Floats>(from + d));
            }
            multiply_keys<OpenDot, Queries>(step, {plain, nullptr, nullptr}, vectors, ahead_, scratch_.scores);
        }
    }

    const Layer& layer_;
    const tg_attention& work_;
    const Scratch& scratch_;
    const TileShape shape_;
    const Tiles tiles_;
    const int dim_;
    Ahead ahead_;
};

}  // namespace tg
