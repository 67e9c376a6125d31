"""What benchmarks share: the machine, pages, worker processes, models."""
