"""Benchmarks of the cache core: its time, its hits, and its agreement with the definition."""
