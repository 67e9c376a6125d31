"""Paged attention in plain torch for kvframe."""
