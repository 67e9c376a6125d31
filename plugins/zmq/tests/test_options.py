"""The publisher's options, addresses that are in use, and the kit's checks."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import zmq
from kvframe_testing.suites import EventPublisherTests
from kvframe_zmq import ZmqPublisher, decode_batch
from kvframe_zmq.wire import END, encode_number

from kvframe.routing import to_plain

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
    bound_socket = context.socket(zmq.PUB)
    port = bound_socket.bind_to_random_port("tcp://127.0.0.1")
    try:
        with pytest.raises(zmq.ZMQError, match="Address already in use"):
            ZmqPublisher(endpoint=f"tcp://127.0.0.1:{port}", replay=f"ipc://{tmp_path}/replay").open()
    finally:
        context.destroy(linger=0)


class TestZmqPublisher(EventPublisherTests):
    publisher = "zmq"
    options: ClassVar[Mapping[str, Any]] = {"endpoint": f"ipc://{tempfile.mkdtemp()}/events"}

    def read(self, publisher: Any) -> Sequence[Mapping[str, Any]]:
        """Return the events of all batches that are kept for who missed them."""
        context, events = zmq.Context(), []
        socket = context.socket(zmq.DEALER)
        try:
            socket.connect(publisher.replay_endpoint)
            socket.send_multipart([b"", encode_number(0)])
            while True:
                *_, number, payload = socket.recv_multipart()
                if number == END:
                    return to_plain(events, with_tokens=False)
                events += decode_batch(payload).events
        finally:
            context.destroy(linger=0)


class TestZmqPublisherInTheFormOfVllm(EventPublisherTests):
    publisher = "zmq"
    options: ClassVar[Mapping[str, Any]] = {"endpoint": f"ipc://{tempfile.mkdtemp()}/events", "form": "vllm"}
