"""Recurrent and convolution state: one state per request, with checkpoints for prefix caching."""

from kvframe_mamba.spec import MambaSpec

__all__ = ["MambaSpec"]
