"""Benchmarks of planned memory, and of request traffic over it."""
