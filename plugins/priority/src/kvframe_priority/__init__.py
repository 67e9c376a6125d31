"""The scheduling policy ``priority``: urgent requests are served first, and none waits for ever."""
