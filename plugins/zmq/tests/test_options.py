"""The publisher's options, and addresses that are in use."""

from __future__ import annotations

from typing import Any

import pytest
import zmq
from kvframe_zmq import ZmqPublisher

ADDRESS = "tcp://127.0.0.1:5557"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "127.0.0.1:5557"}, "endpoint must be like tcp://"),
        ({"endpoint": "tcp://127.0.0.1"}, "endpoint must be like tcp://"),
        ({"endpoint": "tcp://127.0.0.1:99999"}, "endpoint must be like tcp://"),
        ({"endpoint": 5557}, "endpoint must be like tcp://"),
        ({"replay": "udp://host:1"}, "replay must be like tcp://"),
        ({"form": "sglang"}, 'form must be "kvframe" or "vllm"'),
        ({"topic": 3}, "topic must be a text"),
        ({"tokens": 1}, "tokens must be true or false"),
        ({"buffer": 0}, "buffer must be a whole number of at least 1"),
        ({"queue": "many"}, "queue must be a whole number of at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ZmqPublisher(**{"endpoint": ADDRESS, **options})


@pytest.mark.parametrize("address", [ADDRESS, "tcp://*:5557", "ipc:///tmp/events", "inproc://events", "tcp://[::1]:80"])
def test_addresses_that_there_are_are_taken(address: str) -> None:
    assert address == ZmqPublisher(endpoint=address).endpoint


def test_an_address_that_is_in_use_is_refused_when_it_is_opened(tmp_path: Any) -> None:
    context = zmq.Context()
    taken = context.socket(zmq.PUB)
    port = taken.bind_to_random_port("tcp://127.0.0.1")
    try:
        with pytest.raises(zmq.ZMQError, match="Address already in use"):
            ZmqPublisher(endpoint=f"tcp://127.0.0.1:{port}", replay=f"ipc://{tmp_path}/replay").open()
    finally:
        context.destroy(linger=0)
