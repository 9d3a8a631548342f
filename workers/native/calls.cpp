// Prepared calls, one after the other: a step's kernels without going back to Python in between.
#include <cstdint>

extern "C" {

// A kernel and its arguments. Mirrored by calls.py.
struct TgCall {
    int (*run)(const void* arguments);
    const void* arguments;
};

// All of them in order, up to the first that answers with a code other than 0, which is then the answer.
int tg_run(const TgCall* calls, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i)
        if (const int code = calls[i].run(calls[i].arguments)) return code;
    return 0;
}
}
