// Attention over int8 keys and values with a scale per vector.
#include "attention_units.h"

void tg::attend_int8(const Layer& layer, int rank) {
#if defined(__AVX512VNNI__)
    attend_units<Int8Dot>(layer, rank);
#else
    attend_units<WideDot<INT8>>(layer, rank);
#endif
}
