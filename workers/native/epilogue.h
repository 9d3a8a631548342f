// What follows a register tile: bias, scale, activation, and the way to memory. It knows no weights and no threads.
#pragma once

#include "linear.h"
#include "simd.h"

namespace tg {

// The first `bytes` bytes of a vector; all of them when WHOLE.
template <bool WHOLE, class Vector>
inline void store_some(void* to, Vector vector, std::int64_t bytes) {
    if (WHOLE)
        store(to, vector);
    else
        std::memcpy(to, &vector, static_cast<std::size_t>(bytes));
}

// One vector of finished sums to row `out`; unless WHOLE only `left` columns of it exist.
template <int FINISH, bool WHOLE>
inline void put(void* out, std::int64_t column, std::int64_t left, Floats value) {
    if (FINISH == WIDE || FINISH == ADD) {
        float* const to = static_cast<float*>(out) + column;
        Floats before{};
        if (FINISH == ADD) std::memcpy(&before, to, WHOLE ? sizeof before : static_cast<std::size_t>(4 * left));
        store_some<WHOLE>(to, FINISH == ADD ? before + value : value, 4 * left);
    } else {
        store_some<WHOLE>(static_cast<std::uint16_t*>(out) + column, to_bf16(value), 2 * left);
    }
}

template <int FINISH>
inline Floats activate(Floats x) {
    if (FINISH == SILU) return x * sigmoid(x);
    // 0.5 (1 + tanh u) is sigmoid(2u); u = sqrt(2 / pi) (x + 0.044715 x^3).
    if (FINISH == GELU_TANH) return x * sigmoid(1.59576912f * (x + 0.044715f * (x * x * x)));
    return 0.5f * x * (1.0f + error_function(x * 0.707106781f));
}

// The sums of `rows` rows and one tile of columns (two tiles, gate and up, when gated), each [rows][width * 16], for
// output columns from `first` on; `shift` and `scale` are the tile's own (up's follow the gate's) or null.
template <int FINISH>
inline void finish_tile(const TgLinear& part, const float* sums, int rows, const float* shift, const float* scale,
                        std::int64_t first, char* out, std::ptrdiff_t out_bytes) {
    const int columns = part.width * PANEL;
    const std::int64_t end = part.outputs - first < columns ? part.outputs - first : columns;
    const auto finished = [&](const float* row, int column) {
        Floats value = load(row + (column < columns ? column : column - columns));
        if (scale) value *= load(scale + column);
        if (shift) value += load(shift + column);
        return value;
    };
    for (int row = 0; row < rows; row++, sums += columns, out += out_bytes)
        for (int column = 0; column < end; column += LANES) {
            Floats value = finished(sums, column);
            if (FINISH >= SILU) value = activate<FINISH>(value) * finished(sums + rows * columns, columns + column);
            if (end - column >= LANES)
                put<FINISH, true>(out, first + column, LANES, value);
            else
                put<FINISH, false>(out, first + column, end - column, value);
        }
}

inline void finish_tile(const TgLinear& part, const float* sums, int rows, const float* shift, const float* scale,
                        std::int64_t first, char* out, std::ptrdiff_t out_bytes) {
    switch (part.finish) {
        case NARROW: return finish_tile<NARROW>(part, sums, rows, shift, scale, first, out, out_bytes);
        case WIDE: return finish_tile<WIDE>(part, sums, rows, shift, scale, first, out, out_bytes);
        case ADD: return finish_tile<ADD>(part, sums, rows, shift, scale, first, out, out_bytes);
        case SILU: return finish_tile<SILU>(part, sums, rows, shift, scale, first, out, out_bytes);
        case GELU_TANH: return finish_tile<GELU_TANH>(part, sums, rows, shift, scale, first, out, out_bytes);
        default: return finish_tile<GELU>(part, sums, rows, shift, scale, first, out, out_bytes);
    }
}

}  // namespace tg
