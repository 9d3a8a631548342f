// Attention over fp16 keys and values.
#include "attention_units.h"

void tg::attend_fp16(const Layer& layer, int rank) { attend_units<WideDot<FP16>>(layer, rank); }
