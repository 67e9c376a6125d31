"""Benchmarks of the cache core: its time and hits, beside vLLM's and its definition."""
