"""How plugins are found: entry points, the names that they register, and which plugin provides a name."""
