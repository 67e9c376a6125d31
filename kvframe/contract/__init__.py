"""The contract: what a plugin implements, and what it is given. It imports nothing else of kvframe.

``__init__.pyi`` lists the public names. Each is imported when it is first used, so a plugin's manifest loads no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
