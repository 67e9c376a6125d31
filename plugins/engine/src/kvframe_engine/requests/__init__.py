"""One request: its prompt, its parameters, its tokens, and its outputs."""
