"""The eviction policy ``scan_resistant``: pages that were used again stay while one-off prompts pass."""
