"""Which wrappers and which backend serve each layer, and why not the others."""
