"""Layers for kvframe that keep nothing: bidirectional attention of encoders."""

from kvframe_attention_free.spec import EncoderOnlySpec

__all__ = ["EncoderOnlySpec"]
