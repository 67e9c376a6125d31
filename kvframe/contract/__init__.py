"""The contract: what a plugin implements, and what it is given. It imports nothing else of kvframe."""
