"""Attention over paged caches on a CPU: C++ that is compiled for the machine at first use, beside plain torch."""
