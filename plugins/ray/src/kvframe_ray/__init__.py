"""kvframe on Ray Serve: ``serve run kvframe_ray:app model=…`` serves a model with many engines."""

import lazy_loader

# What chooses replicas needs no Ray.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
