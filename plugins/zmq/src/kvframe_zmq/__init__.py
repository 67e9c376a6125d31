"""Cache events over ZeroMQ: the event publisher ``zmq``, and the subscriber that keeps a router's index up to date."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
