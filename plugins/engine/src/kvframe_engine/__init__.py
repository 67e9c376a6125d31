"""kvframe's own engine: it admits and schedules requests, and runs a model's steps over the paged cache of the core.

It is a host like any other: beside the contract, it uses the names of ``kvframe`` only. ``__init__.pyi`` lists its own
names; ``kvframe`` gives them too. Each is imported when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
