"""Cross attention for kvframe: the keys and values of an encoder's output."""

from kvframe_cross_attention.spec import CrossAttentionSpec

__all__ = ["CrossAttentionSpec"]
