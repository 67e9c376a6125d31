"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_event_publishers(register: Register) -> None:
    """Register the publisher."""
    register("zmq", "kvframe_zmq.publisher:ZmqPublisher", needs=["zmq", "msgspec"], install="pip install kvframe-zmq")
