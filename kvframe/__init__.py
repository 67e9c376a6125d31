"""The small, versioned contract between language models' attention and the machinery that serves it.

What a plugin implements is in ``kvframe.contract``. The names here are for users of the engine, of cache plans and of
the cache manager, and for other engines that host plugins; ``__init__.pyi`` lists them. Each is imported when it is
first used, so ``import kvframe`` loads no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
