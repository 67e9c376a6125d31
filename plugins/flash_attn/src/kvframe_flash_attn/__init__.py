"""FlashAttention-2 and FlashAttention-3 for kvframe."""
