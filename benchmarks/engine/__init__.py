"""Benchmarks of whole engines: generating, prefill skipping, steps, and a soak."""
