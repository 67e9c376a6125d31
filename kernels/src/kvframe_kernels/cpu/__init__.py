"""Attention over paged caches on a CPU: C++ that is compiled for the machine at first use, and a torch reference."""
