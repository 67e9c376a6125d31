"""From a model's layers to a cache plan: groups, bytes, block counts, and how many requests fit."""
