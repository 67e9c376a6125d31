"""FlashInfer for kvframe."""
