"""One request: its prompt, its parameters, its tokens, and what its owner gets to see."""
