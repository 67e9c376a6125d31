"""The engine's own contract: what a plugin implements that only an engine can serve. It imports no torch.

Proposers of draft tokens, logits processors and scheduling policies, and the errors of an engine. They grow as
``kvframe.contract`` does, under the same version. ``__init__.pyi`` lists the names; each is imported when it is first
used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
