"""The page store ``valkey``: computed pages in a Valkey or Redis server, which many engines share."""
