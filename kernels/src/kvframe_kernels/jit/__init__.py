"""Kernels for CPUs that numba compiles: a library does, and no compiler has to be there."""
