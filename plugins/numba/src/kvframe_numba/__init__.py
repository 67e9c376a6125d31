"""Paged attention on a CPU for kvframe, by loops that numba compiles: no compiler has to be installed."""
