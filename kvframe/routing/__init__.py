"""What routers need: an index of many engines' caches, made from their events, that computes exact hits.

``__init__.pyi`` lists the public names. Nothing here loads torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
