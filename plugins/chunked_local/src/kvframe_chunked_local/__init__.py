"""Chunked local attention for kvframe: queries see their own chunk of tokens, on any backend."""

from kvframe_chunked_local.spec import ChunkedLocalSpec

__all__ = ["ChunkedLocalSpec"]
