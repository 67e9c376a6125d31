"""The eviction policy ``scan_resistant``: pages that were used again are not evicted for one-off prompts."""
