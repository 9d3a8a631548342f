// Attention over bf16 keys and values.
#include "attention_units.h"

void tg::attend_bf16(const Layer& layer, int rank) {
#if defined(__AVX512BF16__)
    attend_units<Bf16Dot>(layer, rank);
#else
    attend_units<WideDot<BF16>>(layer, rank);
#endif
}
