"""Page stores as a host uses them: keys and seals of pages, stores that may fail or lie, and a thread that writes.

It uses the contract and the names of ``kvframe`` only. ``__init__.pyi`` lists its own names; each is imported when it
is first used, so the secret is read without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
