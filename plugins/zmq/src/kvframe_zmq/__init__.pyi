"""The names of ``kvframe_zmq``, each under the module that defines it."""

from .publisher import ZmqPublisher as ZmqPublisher
from .subscriber import Subscriber as Subscriber
from .wire import decode_batch as decode_batch
from .wire import encode_batch as encode_batch
