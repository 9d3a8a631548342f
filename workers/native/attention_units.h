// The loop over units, in one pair of formats.
#pragma once

#include "attention_layer.h"
#include "attention_walk.h"

namespace tg {

template <Format keys, Format values>
inline void attend_units(const Layer& layer, int rank) {
    const tg_attention& work = *layer.work;
    std::int32_t* const counter = work.pending + work.merge_count;
    const auto take = [&]() -> const Unit* {
        const std::int32_t index = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
        return index < work.unit_count ? work.units + index : nullptr;
    };
    const std::size_t share = Scratch::bytes(work.head_dim);
    const Scratch scratch(work.scratch + rank * share, work.head_dim);
    Walk<keys, values> walk(layer, scratch);
    const Unit* next = take();
    while (const Unit* const unit = next) {
        next = take();
        walk.run(*unit, next);
        // The part that ends last sees what the others have left.
        if (unit->part >= 0 && __atomic_sub_fetch(work.pending + unit->merge, 1, __ATOMIC_ACQ_REL) == 0)
            merge_parts(scratch, Place(work, *unit), layer.sinks, layer.out);
    }
}

}  // namespace tg
