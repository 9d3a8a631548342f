// Walk: one thread's way over the keys of a unit, partition by partition, step by step. It knows no threads, and
// formats only through its Dot.
#pragma once

#include "attention_cache.h"
#include "attention_layer.h"
#include "attention_products.h"
#include "attention_softmax.h"
#include "attention_totals.h"

namespace tg {

constexpr float LOG2_E = 1.4426950408889634f;

template <class Dot>
class Walk {
  public:
    Walk(const Layer& layer, const Scratch& scratch)
        : layer_(layer), work_(*layer.work), scratch_(scratch),
          shape_(static_cast<std::int32_t>(layer.format), work_.head_dim), dim_(work_.head_dim) {}

    // Attend for `unit`: to `out`, or to its place in the partial sums. `next`, or null, is the unit that comes after
    // it, whose first keys are fetched ahead.
    void run(const Unit& unit, const Unit* next, std::uint16_t* out) {
        const Place place(work_, unit);
        take_queries(place);
        const int last = scratch_.position[unit.count - 1] + 1;
        if (unit.part >= 0) {
            attend(place, unit.part, at_most((unit.part + 1) * PARTITION_KEYS, last), next);
            return end_partition(scratch_, place);
        }
        if (unit.parts == 1) {
            attend(place, unit.first_part, last, next);
            sum_lanes(scratch_, unit.count);
            return give_means(scratch_.sums, scratch_.weight, place, out);  // 0 + x is x, to the bit
        }
        begin_totals(scratch_, place);
        for (int part = unit.first_part; part < unit.first_part + unit.parts; ++part) {
            attend(place, part, last, next);
            end_partition(scratch_, place);
        }
        give_means(scratch_.total, scratch_.total_weight, place, out);
    }

  private:
    using Query = typename Dot::Query;

    void take_queries(const Place& place) {
        for (int i = 0; i < place.unit.count; ++i) {
            Query* const to = reinterpret_cast<Query*>(scratch_.queries) + i * dim_;
            scratch_.position[i] = place.position(i);
            scratch_.factor[i] =
                work_.scale * LOG2_E * take_query<Dot>(layer_.heads + place.offset(i, layer_.stride), to, dim_);
        }
    }

    // One partition's sums over the keys below `last` (which may lie behind it).
    void attend(const Place& place, int part, int last, const Unit* next) {
        fill(scratch_.sums, place.unit.count * dim_, 0.0f);
        fill(scratch_.weight, place.unit.count * LANES, 0.0f);
        fill(scratch_.top, place.unit.count, NOTHING);
        fill(scratch_.limit, place.unit.count, -INFINITE);
        const int first = place.first_seen(scratch_.position[0]) / STEP_KEYS * STEP_KEYS;
        const int end = at_most((part + 1) * PARTITION_KEYS, last);
        for (int base = at_least(part * PARTITION_KEYS, first); base < end; base += STEP_KEYS) {
            Step step{{}, &shape_, dim_, base};
            find_tiles(place, base, at_most(STEP_KEYS, end - base), step.tiles);
            fetch_after(place, base, last, next);
            advance(place, step);
            ahead_.finish();
        }
    }

    // The tiles of the keys [base, base + keys) of the unit's head, and the first one in place of those behind them.
    void find_tiles(const Place& place, int base, int keys, const char** tiles) const {
        const int per_block = work_.block_size / TILE_SLOTS, index = base / TILE_SLOTS;
        const char* const head = layer_.page + static_cast<std::size_t>(place.unit.head) * per_block * shape_.bytes;
        const std::int32_t* block = work_.tables + place.row.table + index / per_block;
        int within = index % per_block;
        const char* const first = head + *block * layer_.page_bytes + within * shape_.bytes;
        for (int i = 0; i < STEP_KEYS / TILE_SLOTS; ++i) {
            tiles[i] = i * TILE_SLOTS < keys ? head + *block * layer_.page_bytes + within * shape_.bytes : first;
            if (++within < per_block) continue;
            within = 0;
            ++block;
        }
    }

    // Ask for the step that comes after the one at `base`: this unit's, else the next one's first.
    void fetch_after(const Place& place, int base, int last, const Unit* next) {
        if (base + STEP_KEYS < last) return fetch(place, base + STEP_KEYS, last);
        if (!next) return;
        const Place after(work_, *next);
        const int first = after.first_seen(after.position(0)) / STEP_KEYS * STEP_KEYS;
        fetch(after, at_least(next->part * PARTITION_KEYS, first), after.position(next->count - 1) + 1);
    }

    void fetch(const Place& place, int base, int end) {
        const char* tiles[STEP_KEYS / TILE_SLOTS];
        const int keys = at_most(STEP_KEYS, end - base);
        find_tiles(place, base, keys, tiles);
        ahead_.begin(tiles, (keys + TILE_SLOTS - 1) / TILE_SLOTS, shape_.bytes);
    }

    // All queries of the unit, a few at a time.
    void advance(const Place& place, const Step& step) {
        int count = 0;
        for (int first = 0; first < place.unit.count; first += count) {
            count = pass_of<Dot>(place.unit.count - first);
            const std::int32_t* const positions = scratch_.position + first;
            if (positions[count - 1] < step.base) continue;
            if (place.first_seen(positions[0]) >= step.base + STEP_KEYS) continue;
            switch (count) {
                case 1: advance_pass<1>(place, step, first); break;
                case 2: advance_pass<2>(place, step, first); break;
                case 3: if constexpr (Dot::PASS >= 3) advance_pass<3>(place, step, first); break;
                case 4: if constexpr (Dot::PASS >= 4) advance_pass<4>(place, step, first); break;
                case 6: if constexpr (Dot::PASS >= 6) advance_pass<6>(place, step, first); break;
                default: break;
            }
        }
    }

    template <int Queries>
    void advance_pass(const Place& place, const Step& step, int first) {
        int from[Queries], to[Queries];
        float fades[Queries], units[Queries];
        for (int i = 0; i < Queries; ++i) {
            const int position = scratch_.position[first + i];
            from[i] = at_least(0, place.first_seen(position) - step.base);
            to[i] = at_most(STEP_KEYS, position + 1 - step.base);
        }
        const int begin = from[0], end = to[Queries - 1], vectors = (end + LANES - 1) / LANES;
        const bool partial = from[Queries - 1] > 0 || to[0] < vectors * LANES;
        const Sight sight{vectors, partial, from, to, work_.soft_cap * LOG2_E, &step};
        const Running running{scratch_.top + first, scratch_.limit + first, scratch_.weight + first * LANES};
        const Query* const queries = reinterpret_cast<const Query*>(scratch_.queries) + first * dim_;
        Query* const weights = reinterpret_cast<Query*>(scratch_.shares);
        multiply_keys<Dot, Queries>(step, queries, vectors, ahead_, scratch_.scores);
        soften<Dot>(Queries, scratch_.scores, scratch_.factor + first, sight, running, fades, units, weights);
        const Values values{&step, begin, end, blank_edges<Dot>(step, begin, end, scratch_.edges)};
        multiply_values<Dot, Queries>(values, weights, fades, units, ahead_, scratch_.sums + first * dim_);
    }

    const Layer& layer_;
    const tg_attention& work_;
    const Scratch& scratch_;
    const TileShape shape_;
    const int dim_;
    Ahead ahead_;
};

}  // namespace tg
