"""Paged attention in Triton for kvframe."""
