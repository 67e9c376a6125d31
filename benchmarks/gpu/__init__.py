"""Benchmarks of attention and of engine steps on a GPU."""
