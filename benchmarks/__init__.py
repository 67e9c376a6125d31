"""What is measured, against which peer. Run from the root: ``python -m benchmarks.cache.core``."""
