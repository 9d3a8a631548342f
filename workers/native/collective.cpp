// Collectives between ranks that share memory: sum, least value, message, gather. They know floats and bytes, neither
// plans nor models. Each is made of turns; see turns.h. What a call returns is 0, or what fails a turn.

#include <algorithm>
#include <cstring>

#include "threads.h"
#include "turns.h"

namespace {

using tg::line;
using tg::next_turn;
using tg::post;
using tg::slot;
using tg::wait_for;
using tg::wait_for_all;

constexpr int64_t UNIT = 4096;            // floats that one thread adds at a time
constexpr int64_t SHARED_WORK = 1 << 16;  // floats from which on more than one thread adds

// target[i] = Σ of the ranks' parts, in the order of ranks, on top of target[i] when BASED. `own` is what this rank has
// in its slot, and may be `target`.
template <bool BASED>
void add_up(const tg_member* me, uint32_t turn, const float* own, float* target, int64_t from, int64_t until) {
    constexpr int64_t STRETCH = 512;
    const auto part = [&](int rank) {
        return rank == me->rank ? own : reinterpret_cast<const float*>(slot(me, rank, turn));
    };
    for (int64_t start = from; start < until; start += STRETCH) {
        const int64_t count = std::min(STRETCH, until - start);
        float sums[STRETCH];
        const float *first = part(0) + start, *second = part(1) + start;
        for (int64_t i = 0; i < count; ++i) sums[i] = first[i] + second[i];
        for (int rank = 2; rank < me->world; ++rank) {
            const float* next = part(rank) + start;
            for (int64_t i = 0; i < count; ++i) sums[i] += next[i];
        }
        float* out = target + start;
        for (int64_t i = 0; i < count; ++i) out[i] = BASED ? out[i] + sums[i] : sums[i];
    }
}

template <bool BASED>
int sum(const tg_member* me, const float* part, float* target, int64_t count) {
    const int64_t most = me->slot / int64_t(sizeof(float));
    for (int64_t done = 0; done < count; done += most) {
        const int64_t piece = std::min(most, count - done);
        const uint32_t turn = next_turn(me);
        if (const int code = wait_for_all(me, turn - 1)) return code;
        const float* own = part + done;
        tg::hand_over(slot(me, me->rank, turn), own, piece * sizeof(float));
        post(me, turn);
        if (const int code = wait_for_all(me, turn)) return code;
        if (piece < SHARED_WORK) {
            add_up<BASED>(me, turn, own, target + done, 0, piece);
            continue;
        }
        const int64_t units = (piece + UNIT - 1) / UNIT;
#pragma omp parallel for schedule(static) num_threads(tg::threads())
        for (int64_t unit = 0; unit < units; ++unit)
            add_up<BASED>(me, turn, own, target + done, unit * UNIT, std::min(piece, (unit + 1) * UNIT));
    }
    return 0;
}

// Copy floats [from, from + count) of a flat [rows, width] at `source` to `target`, rows `stride` floats apart.
void spread(const float* source, int64_t from, int64_t count, int64_t width, float* target, int64_t stride) {
    while (count > 0) {
        const int64_t row = from / width, column = from % width, piece = std::min(count, width - column);
        std::memcpy(target + row * stride + column, source, piece * sizeof(float));
        source += piece;
        from += piece;
        count -= piece;
    }
}

}  // namespace

extern "C" {

// The bytes of a segment for `world` ranks are written to `bytes`. A new segment is all zeros.
int tg_segment_bytes(int world, int64_t slot_bytes, int64_t* bytes) {
    tg_member any{};
    any.world = world;
    any.slot = slot_bytes;
    *bytes = slot(&any, world, 0) - any.segment;
    return 0;
}

// values[0, count) become their sum over ranks.
int tg_sum(const tg_member* me, float* values, int64_t count) { return sum<false>(me, values, values, count); }

// stream[0, count) grows by the sum over ranks of part[0, count).
int tg_sum_onto(const tg_member* me, const float* part, float* stream, int64_t count) {
    return sum<true>(me, part, stream, count);
}

// `value` becomes the least of all ranks'.
int tg_least(const tg_member* me, int64_t* value) {
    const uint32_t turn = next_turn(me);
    if (const int code = wait_for_all(me, turn - 1)) return code;
    line(me, me->rank).values[turn & 1] = *value;
    post(me, turn);
    if (const int code = wait_for_all(me, turn)) return code;
    for (int rank = 0; rank < me->world; ++rank) *value = std::min(*value, line(me, rank).values[turn & 1]);
    return 0;
}

// Rank 0: a message to all others. It does not wait until they have read it, but fails when one of them is gone.
int tg_send(const tg_member* me, const char* message, int64_t bytes) {
    if (const int code = tg::trouble(me)) return code;
    int64_t offset = sizeof(int64_t);  // the first piece begins with the length
    int64_t done = 0;
    do {
        const uint32_t turn = next_turn(me);
        if (const int code = wait_for_all(me, turn - 1)) return code;
        char* mine = slot(me, me->rank, turn);
        if (offset) std::memcpy(mine, &bytes, sizeof bytes);
        const int64_t piece = std::min(me->slot - offset, bytes - done);
        std::memcpy(mine + offset, message + done, piece);
        post(me, turn);
        done += piece;
        offset = 0;
    } while (done < bytes);
    return 0;
}

// The others: wait for rank 0's next message; its length is written to `bytes`. tg_receive must follow.
int tg_await(const tg_member* me, int64_t* bytes) {
    const uint32_t turn = next_turn(me);
    if (const int code = wait_for(me, 0, turn)) return code;
    std::memcpy(bytes, slot(me, 0, turn), sizeof *bytes);
    return 0;
}

// Read the message of `bytes` bytes that tg_await has announced.
int tg_receive(const tg_member* me, char* message, int64_t bytes) {
    int64_t offset = sizeof(int64_t);
    int64_t done = 0;
    do {
        const uint32_t turn = next_turn(me);
        if (const int code = wait_for(me, 0, turn)) return code;
        const int64_t piece = std::min(me->slot - offset, bytes - done);
        std::memcpy(message + done, slot(me, 0, turn) + offset, piece);
        post(me, turn);
        done += piece;
        offset = 0;
    } while (done < bytes);
    return 0;
}

// Rank 0: all[rows, Σ widths] from every rank's local[rows, widths[rank]], side by side in the order of ranks. The
// others: `all` is not used.
int tg_gather(const tg_member* me, const float* local, int64_t rows, const int64_t* widths, float* all) {
    const int64_t most = me->slot / int64_t(sizeof(float));
    int64_t total = 0, widest = 0;
    for (int rank = 0; rank < me->world; ++rank) {
        total += widths[rank];
        widest = std::max(widest, widths[rank]);
    }
    const int64_t own = rows * widths[me->rank];
    if (me->rank == 0) spread(local, 0, own, widths[0], all, total);
    for (int64_t from = 0; from < rows * widest; from += most) {
        const uint32_t turn = next_turn(me);
        if (me->rank > 0) {
            if (const int code = wait_for_all(me, turn - 1)) return code;
            const int64_t count = std::min(most, own - from);
            if (count > 0) tg::hand_over(slot(me, me->rank, turn), local + from, count * sizeof(float));
            post(me, turn);
            continue;
        }
        float* target = all + widths[0];
        for (int rank = 1; rank < me->world; target += widths[rank++]) {
            if (const int code = wait_for(me, rank, turn)) return code;
            const float* part = reinterpret_cast<const float*>(slot(me, rank, turn));
            const int64_t count = std::min(most, rows * widths[rank] - from);
            if (count > 0) spread(part, from, count, widths[rank], target, total);
        }
        post(me, turn);
    }
    return 0;
}

// Everyone who waits, or comes to wait, fails.
int tg_hang_up(const tg_member* me) { return tg::hang_up(me, 0); }
}
