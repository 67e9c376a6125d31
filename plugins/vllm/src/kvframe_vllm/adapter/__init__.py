"""The adapter for all tested versions of vLLM: what is changed in vLLM, and what vLLM calls."""
