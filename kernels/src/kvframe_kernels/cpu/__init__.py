"""Attention over paged caches on a CPU: C++, compiled in the wheel or at first use, and a torch reference."""
