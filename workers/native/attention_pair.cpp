// The kernels of one pair of formats, TG_KEYS and TG_VALUES: a shared object of its own.
#include "attention_units.h"

extern "C" {

// Rotate and store the tokens [first, stop). One thread has all tokens of a row whose slots share a word.
void tg_cache(const tg::Layer& layer, int first, int stop) {
    tg::cache_tokens<tg::TG_KEYS, tg::TG_VALUES>(layer, first, stop);
}

// Take units until there are none left, as thread `rank` of those that the plan counted on.
void tg_attend(const tg::Layer& layer, int rank) { tg::attend_units<tg::TG_KEYS, tg::TG_VALUES>(layer, rank); }
}
