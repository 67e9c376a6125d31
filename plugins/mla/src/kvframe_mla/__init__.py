"""Multi-head latent attention for kvframe: a cache of latents, and a backend for it."""

from kvframe_mla.spec import MLASpec

__all__ = ["MLASpec"]
