"""Code that all benchmarks share: the command, the record and its page, worker processes, models."""
