// Sampling: logits and draws to tokens, one pass over mixed rows. The rules are those of workers/sampler.py. It knows
// neither sequences nor where logits come from.
//
// Weights are exp((logit - greatest) / temperature), so the greatest is 1. Top-k, top-p and min-p each come down to the
// least weight that stays. To find it the heavier weights are collected, at first those above 2^-10, and a selection by
// partition finds the k-th greatest of them, or the one that crosses the share, in linear time. The token is then found
// by inverse CDF in vocabulary order: the block of the vocabulary first, then the place in it.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "simd.h"
#include "threads.h"

namespace {

using tg::Floats;

constexpr int64_t BLOCK = 256;                     // of the vocabulary
constexpr float FLOORS[] = {0x1p-10f, 0x1p-20f, 1e-38f};  // the last is below every weight that is not 0
constexpr float INF = std::numeric_limits<float>::infinity();

enum Kind : int32_t { GREEDY = 0, PLAIN = 1, FILTERED = 2 };

// One row's draw, as workers/native/sampling.py packs it.
struct Draw {
    uint64_t seed;
    int64_t position;
    int64_t top_k;  // from the vocabulary's size on it is off
    double top_p;
    float temperature;
    float min_p;
    int32_t kind;
    int32_t padding;
};

// What a thread works in: the row's weights in whole blocks, the collected ones, each block's greatest and its sum.
struct Scratch {
    float* weights;
    float* heavy;
    float* peaks;
    double* sums;
};

struct Selection {
    float weight;
    int64_t before;  // how many weights are heavier
    double mass;     // and their sum
};

int64_t blocks_of(int64_t vocabulary) { return (vocabulary + BLOCK - 1) / BLOCK; }

uint64_t mixed(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

// A number in [0, 1) with 32 random bits: two rounds of SplitMix64 (Steele 2014).
double uniform(uint64_t seed, int64_t position) {
    const uint64_t state = mixed(seed ^ 0x9E3779B97F4A7C15u);
    return double(mixed(state + (uint64_t(position) + 1) * 0x9E3779B97F4A7C15u) >> 32) / 4294967296.0;
}

// The greatest of `values`; those that cannot be compared are passed over.
float greatest(const float* values, int64_t count) {
    constexpr int64_t STEP = 4 * tg::LANES;
    Floats peaks[4] = {tg::splat(-INF), tg::splat(-INF), tg::splat(-INF), tg::splat(-INF)};
    int64_t i = 0;
    for (; i + STEP <= count; i += STEP)
        for (int64_t part = 0; part < 4; ++part) {
            const Floats value = tg::load(values + i + part * tg::LANES);
            peaks[part] = tg::choose(value > peaks[part], value, peaks[part]);
        }
    float found = -INF;
    for (const Floats& peak : peaks) found = std::max(found, tg::greatest(peak));
    for (; i < count; ++i) found = values[i] > found ? values[i] : found;
    return found;
}

// The lowest index of the greatest value; 0 where nothing can be compared.
int64_t argmax(const float* values, int64_t count) {
    constexpr int64_t STRETCH = 1024;
    float peak = -INF;
    int64_t place = 0;
    for (int64_t start = 0; start < count; start += STRETCH) {
        const float here = greatest(values + start, std::min(STRETCH, count - start));
        if (here > peak) {
            peak = here;
            place = start;
        }
    }
    while (place < count - 1 && values[place] != peak) ++place;
    return values[place] == peak ? place : 0;
}

// A block's sum of the weights that are at least `cut`, in one order on every processor.
double sum_of_block(const float* weights, float cut) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef int32_t Masks __attribute__((vector_size(32)));
    typedef double Sums __attribute__((vector_size(64)));
    Sums sums{};
    for (int64_t i = 0; i < BLOCK; i += 8) {
        const Eight value = tg::load<Eight>(weights + i);
        sums += __builtin_convertvector((Eight)((Masks)(value >= cut) & (Masks)value), Sums);
    }
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// The row's weights in whole blocks, filled up with 0, and each block's greatest.
void weigh(const float* logits, int64_t vocabulary, float temperature, const Scratch& scratch) {
    const float peak = greatest(logits, vocabulary);
    float last[BLOCK];
    for (int64_t block = 0; block < blocks_of(vocabulary); ++block) {
        const float* from = logits + block * BLOCK;
        const int64_t count = std::min(BLOCK, vocabulary - block * BLOCK);
        if (count < BLOCK) {
            std::fill(std::copy(from, from + count, last), last + BLOCK, -INF);
            from = last;
        }
        float* to = scratch.weights + block * BLOCK;
        for (int64_t i = 0; i < BLOCK; i += tg::LANES) {
            // Subtract before dividing: a small temperature must not overflow to inf - inf.
            const Floats heat = (tg::load(from + i) - peak) / temperature;
            tg::store(to + i, tg::choose(heat > -87.0f, tg::exponential(heat), Floats{}));
        }
        scratch.peaks[block] = greatest(to, BLOCK);
    }
}

// The greatest weight w such that those at least as heavy are `wanted` or more, or weigh `share` or more; the lightest
// where that is never so. Reorders values[0, count), which must not be empty.
Selection select(float* values, int64_t count, int64_t wanted, double share) {
    int64_t before = 0;
    double mass = 0.0;
    for (;;) {
        const float first = values[0], middle = values[count / 2], last = values[count - 1];
        const float pivot = std::max(std::min(first, middle), std::min(std::max(first, middle), last));
        // [0, above) are heavier than the pivot, [above, at) equal to it, [below, count) lighter.
        int64_t above = 0, at = 0, below = count;
        double heavy = 0.0;
        while (at < below) {
            const float value = values[at];
            if (value > pivot) {
                heavy += value;
                std::swap(values[at++], values[above++]);
            } else if (value < pivot) {
                std::swap(values[at], values[--below]);
            } else {
                ++at;
            }
        }
        if (above > 0 && (before + above >= wanted || mass + heavy >= share)) {
            count = above;
            continue;
        }
        const double reached = mass + heavy + double(below - above) * pivot;
        if (before + below >= wanted || reached >= share || below == count)
            return {pivot, before + above, mass + heavy};
        before += below;
        mass = reached;
        values += below;
        count -= below;
    }
}

// The weights of at least `least` into scratch.heavy; how many, and their sum.
int64_t collect(const Scratch& scratch, int64_t vocabulary, float least, double* mass) {
    int64_t found = 0;
    *mass = 0.0;
    for (int64_t block = 0; block < blocks_of(vocabulary); ++block) {
        if (scratch.peaks[block] < least) continue;
        *mass += sum_of_block(scratch.weights + block * BLOCK, least);
        for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; ++i) {
            scratch.heavy[found] = scratch.weights[i];  // there is one place more than there are weights
            found += scratch.weights[i] >= least;
        }
    }
    return found;
}

// The least weight that top-k and top-p let through; 0 where both are off.
float least_kept(const Scratch& scratch, int64_t vocabulary, const Draw& draw, double total) {
    const bool limited = draw.top_k < vocabulary, shared = draw.top_p < 1.0;
    const int64_t wanted = limited ? draw.top_k : std::numeric_limits<int64_t>::max();
    if (!limited && !shared) return 0.0f;
    double mass = 0.0;
    int64_t found = 0;
    for (const float floor : FLOORS) {
        found = collect(scratch, vocabulary, floor, &mass);
        if (limited ? found >= wanted : mass >= draw.top_p * total) break;
    }
    if (!limited) return select(scratch.heavy, found, wanted, draw.top_p * total).weight;
    const Selection last = select(scratch.heavy, found, wanted, INF);
    if (!shared) return last.weight;
    // Top-p shares out what top-k leaves: of those that tie at the last place, as many as there are places.
    const double base = last.mass + double(wanted - last.before) * last.weight;
    return select(scratch.heavy, found, wanted, draw.top_p * base).weight;
}

// The first token at which the running sum over weights of at least `cut` passes `place` of the whole.
int64_t pick(const Scratch& scratch, int64_t vocabulary, float cut, double place) {
    const int64_t blocks = blocks_of(vocabulary);
    double total = 0.0;
    int64_t last = 0;  // the last block with a token to draw
    for (int64_t block = 0; block < blocks; ++block) {
        const bool any = scratch.peaks[block] >= cut && scratch.peaks[block] > 0.0f;
        scratch.sums[block] = any ? sum_of_block(scratch.weights + block * BLOCK, cut) : 0.0;
        total += scratch.sums[block];
        if (any) last = block;
    }
    const double target = place * total;
    double sum = 0.0;
    int64_t block = 0;
    for (; block < last && sum + scratch.sums[block] <= target; ++block) sum += scratch.sums[block];
    int64_t token = 0;
    for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; ++i) {
        const float weight = scratch.weights[i];
        if (!(weight > 0.0f) || weight < cut) continue;
        // Rounding may leave a rest that no token passes: it goes to the last one.
        token = i;
        sum += weight;
        if (sum > target) break;
    }
    return token;
}

int64_t draw_token(const float* logits, int64_t vocabulary, const Draw& draw, const Scratch& scratch) {
    if (draw.kind == GREEDY) return argmax(logits, vocabulary);
    weigh(logits, vocabulary, draw.temperature, scratch);
    float cut = 0.0f;
    if (draw.kind == FILTERED) {
        double total = 0.0;
        for (int64_t block = 0; block < blocks_of(vocabulary); ++block)
            total += sum_of_block(scratch.weights + block * BLOCK, 0.0f);
        cut = std::max(least_kept(scratch, vocabulary, draw, total), draw.min_p);
    }
    return pick(scratch, vocabulary, cut, uniform(draw.seed, draw.position));
}

}  // namespace

extern "C" {

// The bytes of scratch that one thread of tg_sample needs, a multiple of 64.
int tg_sample_scratch(int64_t vocabulary, int64_t* bytes) {
    const int64_t blocks = blocks_of(vocabulary), whole = blocks * BLOCK;
    *bytes = (blocks * 8 + (whole + (whole + 1) + blocks) * 4 + 63) / 64 * 64;
    return 0;
}

// tokens[rows] from logits (rows of `vocabulary` floats, `stride` floats apart) and draws[rows]. `scratch` has what
// `rooms` threads need, 64-byte aligned; no more of them take part.
int tg_sample(const float* logits, int64_t stride, int64_t rows, int64_t vocabulary, const void* draws, char* scratch,
              int rooms, int64_t* tokens) {
    const Draw* each = static_cast<const Draw*>(draws);
    const int64_t blocks = blocks_of(vocabulary), whole = blocks * BLOCK;
    int64_t bytes = 0;
    tg_sample_scratch(vocabulary, &bytes);
#pragma omp parallel for schedule(dynamic, 1) num_threads(std::min(tg::threads(), rooms)) if (rows > 1)
    for (int64_t row = 0; row < rows; ++row) {
        char* own = scratch + bytes * omp_get_thread_num();
        double* sums = reinterpret_cast<double*>(own);
        float* weights = reinterpret_cast<float*>(own + blocks * 8);
        const Scratch mine{weights, weights + whole, weights + 2 * whole + 1, sums};
        tokens[row] = draw_token(logits + row * stride, vocabulary, each[row], mine);
    }
    return 0;
}
}
