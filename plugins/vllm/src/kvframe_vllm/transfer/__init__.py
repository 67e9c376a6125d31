"""What the connector does: finds prefixes in page stores, loads their pages into vLLM's memory, and saves new pages."""
