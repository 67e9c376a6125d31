"""CPU kernels that numba compiles, for machines without a C++ compiler."""
