"""The CPU kernels in C++: a shared library with a plain C ABI, compiled at first use for the processor at hand."""
