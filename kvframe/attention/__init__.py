"""Attention: batch metadata, wrappers, backends, and the choice between them."""
