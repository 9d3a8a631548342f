// The plan of a step: its attention cut into units, about from the longest to the shortest. How it is cut changes no
// bit of what comes out: queries are independent, and a partition's sums are the same whoever computes them.
#include "attention_page.h"
#include "attention_totals.h"
#include "threads.h"

namespace {

using tg::at_most;
using tg::PARTITION_KEYS;
using tg::Row;
using tg::Unit;

// A unit that is more than one of so many parts of a thread's work is cut into partitions.
constexpr int UNITS_PER_THREAD = 4;
constexpr std::int64_t MOST_PARTIALS = 1 << 22;  // floats

class Planner {
  public:
    explicit Planner(tg_attention& work) : work_(work), room_(work.units ? work.unit_room : 0) {}

    void plan() {
        work_.threads = tg::threads();
        work_.unit_count = work_.partial_count = work_.merge_count = 0;
        work_.scratch_count = work_.threads * static_cast<std::int64_t>(tg::Scratch::bytes(work_.head_dim));
        std::int64_t sum = 0;
        int longest = 0, shortest = 63;
        each([&](const Unit&, std::int64_t cost) {
            sum += cost;
            longest = tg::at_least(longest, magnitude(cost));
            shortest = at_most(shortest, magnitude(cost));
        });
        work_.cost = sum;
        const std::int64_t most = sum / (work_.threads * UNITS_PER_THREAD);
        for (int size = longest; size >= shortest; --size)
            each([&](const Unit& unit, std::int64_t cost) {
                if (magnitude(cost) == size) cost > most && unit.parts > 1 ? cut(unit) : put(unit);
            });
    }

  private:
    template <class Visit>
    void each(const Visit& visit) const {
        const int ratio = work_.q_heads / work_.kv_heads;
        for (int index = 0; index < work_.row_count; ++index) {
            const Row& row = work_.rows[index];
            for (int first = 0, count = 0; first < row.count * ratio; first += count) {
                count = at_most(tg::UNIT_QUERIES, row.count * ratio - first);
                if (work_.opened[0]) count = at_most(count, left_in_block(row, first / ratio) * ratio - first % ratio);
                Unit unit{index, 0, first, count, -1, 0, 0, 0, 0};
                const tg::Place place(work_, unit);
                const int from = place.first_seen(place.position(0)), to = place.position(count - 1) + 1;
                unit.first_part = from / PARTITION_KEYS;
                unit.parts = (to + PARTITION_KEYS - 1) / PARTITION_KEYS - unit.first_part;
                // Reading a key costs about as much as multiplying it with a few queries.
                const std::int64_t cost = static_cast<std::int64_t>(to - from) * (count + 8);
                for (; unit.head < work_.kv_heads; ++unit.head) visit(unit, cost);
            }
        }
    }

    // Tokens from `token` of a row on that are in one block: what a query reads depends on whether it is its own.
    int left_in_block(const Row& row, int token) const {
        return work_.block_size - (row.start + token) % work_.block_size;
    }

    static int magnitude(std::int64_t cost) { return 63 - __builtin_clzll(cost); }

    void cut(Unit unit) {
        const std::int64_t vectors = static_cast<std::int64_t>(unit.parts) * unit.count;
        if (work_.partial_count + vectors * (work_.head_dim + 2) > MOST_PARTIALS) return put(unit);
        unit.merge = work_.merge_count++;
        unit.piece = static_cast<std::int32_t>(work_.partial_count / (work_.head_dim + 2));
        work_.partial_count += vectors * (work_.head_dim + 2);
        for (int part = 0; part < unit.parts; ++part) {
            unit.part = unit.first_part + part;
            put(unit);
        }
    }

    void put(const Unit& unit) {
        if (work_.unit_count < room_) work_.units[work_.unit_count] = unit;
        ++work_.unit_count;
    }

    tg_attention& work_;
    const std::int64_t room_;
};

// Whether the rows follow each other and find the blocks that they see in the pool.
bool is_sound(const tg_attention& work) {
    int tokens = 0;
    for (int i = 0; i < work.row_count; ++i) {
        const Row& row = work.rows[i];
        if (row.first != tokens || row.count < 1 || row.start < 0 || row.table < 0) return false;
        const int first = tg::first_seen(work, row.start) / work.block_size;
        const int stop = (row.start + row.count + work.block_size - 1) / work.block_size;
        if (stop > work.table_count - row.table) return false;
        for (int block = first; block < stop; ++block) {
            const std::int32_t found = work.tables[row.table + block];
            if (found < 0 || found >= work.blocks) return false;
        }
        for (const std::int32_t* const opened : work.opened)
            for (int block = row.start / work.block_size; opened && block < stop; ++block)
                if (opened[row.table + block] < 0 || opened[row.table + block] >= work.blocks) return false;
        tokens += row.count;
    }
    return tokens == work.tokens;
}

}  // namespace

extern "C" {

// Cut the step's work into units. 1: there is not enough room; the counts say how much is needed, ask again. 2: the
// rows are not sound.
int tg_attention_plan(tg_attention* work) {
    if (!is_sound(*work)) return 2;
    Planner(*work).plan();
    const bool enough = work->unit_count <= work->unit_room && work->partial_count <= work->partial_room &&
                        work->scratch_count <= work->scratch_room;
    return enough ? 0 : 1;
}
}
