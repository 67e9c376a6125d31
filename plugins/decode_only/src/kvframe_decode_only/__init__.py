"""Prefill skipping for kvframe: layers that share another layer's cache compute generating tokens only."""
