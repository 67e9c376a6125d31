"""Models as the contract sees them: descriptions without weights, and adapters that run them."""
