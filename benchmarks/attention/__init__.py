"""Benchmarks of attention, its metadata and its stored formats, on a CPU."""
