// How many OpenMP threads a parallel region of this library uses. It knows no kernel.
#pragma once

namespace tg {

// The number that tg_set_threads() was told, else OpenMP's own. OpenMP keeps its number per calling thread, and a rank
// loads in one Python thread and steps in another: a region therefore names its number, as
// `#pragma omp parallel num_threads(tg::threads())`.
int threads();

}  // namespace tg
