"""Prefixes that an engine keeps by name, and the files that they are saved to."""
