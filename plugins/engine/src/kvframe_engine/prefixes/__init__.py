"""Prefixes of given prompts that an engine computes and pins, and the files that it saves them to."""
