"""Fast paged attention on CPUs for kvframe."""
