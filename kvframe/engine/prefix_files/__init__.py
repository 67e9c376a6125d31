"""Files of saved prefixes: their format, and reading and writing them."""
