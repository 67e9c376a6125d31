"""The event publisher ``zmq``: a PUB socket for events, and a ROUTER socket for what subscribers missed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs
import msgspec
import zmq

from kvframe.contract import EventPublisher, OpenEventPublisher
from kvframe.routing import EventBatch, PrefixIndex, from_plain
from kvframe_zmq.address import check_address, replay_address
from kvframe_zmq.vllm_form import VllmForm
from kvframe_zmq.wire import END, SNAPSHOT, encode_batch, encode_number

_log = logging.getLogger("kvframe")
_POLL_MS = 100
_LINGER_MS = 500
FORMS = ("kvframe", "vllm")


@attrs.frozen(kw_only=True)
class ZmqPublisher(EventPublisher):
    """Publishes events over ZeroMQ, as vLLM's publisher does.

    Attributes:
        endpoint: The address of the PUB socket.
        replay: The address of the ROUTER socket; the next port, or the path with ``.replay``, unless given.
        connect: Whether the PUB socket connects to the address, where a consumer is bound. Otherwise it is bound there.
        topic: The first frame of each message.
        form: What is sent: ``"kvframe"`` for an exact index, or ``"vllm"``, the events of vLLM, for its indexers.
        tokens: Whether the form ``"kvframe"`` contains token ids; ``"vllm"`` always does.
        int_hashes: Whether hashes of the form ``"vllm"`` are numbers of 64 bits, as vLLM's are unless it is told
            otherwise, or bytes.
        buffer: Batches that are kept for subscribers that missed them.
        queue: Messages that are kept for a subscriber that is slow; further ones are lost to it.
    """

    name: ClassVar[str] = "zmq"

    endpoint: str
    replay: str | None = None
    connect: bool = False
    topic: str = ""
    form: Literal["kvframe", "vllm"] = "kvframe"
    tokens: bool = False
    int_hashes: bool = True
    buffer: int = 10_000
    queue: int = 100_000

    def __attrs_post_init__(self) -> None:
        """Check the options."""
        check_address("endpoint", self.endpoint)
        if self.replay is not None:
            check_address("replay", self.replay)
        if self.form not in FORMS:
            raise ValueError(f'form must be "kvframe" or "vllm", not {self.form!r}')
        if not isinstance(self.topic, str):
            raise ValueError(f"topic must be a text, not {self.topic!r}")
        for name in ("connect", "tokens", "int_hashes"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}")
        for name in ("buffer", "queue"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")

    @property
    def replay_endpoint(self) -> str:
        """The address of the ROUTER socket."""
        return replay_address(self.endpoint) if self.replay is None else self.replay

    def open(self) -> OpenEventPublisher:
        """Bind both sockets; raise ``zmq.ZMQError`` if an address is in use or not of this machine."""
        return OpenZmqPublisher(self)


class OpenZmqPublisher(OpenEventPublisher):
    """An open publisher, with a thread that answers subscribers.

    Invariant: the mirror contains the events of all numbers before the next one; ``_lock`` is held to change both.
    """

    def __init__(self, options: ZmqPublisher) -> None:
        """Bind the sockets and start the thread."""
        self._options, self._topic = options, options.topic.encode()
        self._epoch, self._next = os.urandom(8), 0
        self._mirror = PrefixIndex(bytes(32))
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=options.buffer)
        self._lock, self._is_closing = threading.Lock(), threading.Event()
        self._vllm = VllmForm(int_hashes=options.int_hashes) if options.form == "vllm" else None
        self._context = zmq.Context()
        try:
            self._sender = self._context.socket(zmq.PUB)
            self._sender.set_hwm(options.queue)
            self._sender.linger = _LINGER_MS
            if options.connect:
                self._sender.connect(options.endpoint)
            else:
                self._sender.bind(options.endpoint)
            self._router = self._context.socket(zmq.ROUTER)
            self._router.set_hwm(0)  # an answer is lost as a whole or not at all
            self._router.linger = 0
            self._router.bind(options.replay_endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._answer_all, name="kvframe-zmq-replay", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Send one batch to all subscribers. It does not wait: a message to a full queue is lost to its subscriber."""
        if self._vllm is not None:
            payload = msgspec.msgpack.encode([time.time(), self._vllm.events_of(events), 0])
        else:
            batch = EventBatch(self._epoch, self._next, from_plain(events))
            payload = encode_batch(batch, with_tokens=self._options.tokens)
        with self._lock:
            if self._vllm is None:
                self._mirror.apply("", batch.events)
            number, self._next = self._next, self._next + 1
            self._buffer.append((number, payload))
        self._sender.send_multipart([self._topic, encode_number(number), payload], zmq.NOBLOCK)

    def close(self) -> None:
        """Send what is queued, for half a second at most, and close the sockets."""
        self._is_closing.set()
        self._thread.join()
        self._sender.close()
        self._context.term()

    # --- what subscribers ask for ---------------------------------------------------------------------------------

    def _answer_all(self) -> None:
        try:
            while not self._is_closing.is_set():
                if self._router.poll(_POLL_MS):
                    try:
                        self._answer(self._router.recv_multipart())
                    except (ValueError, zmq.ZMQError) as error:
                        _log.warning("a request for cache events was not answered: %s", error)
        finally:
            self._router.close()

    def _answer(self, frames: Sequence[bytes]) -> None:
        """Answer a request: everything, or the batches from a number on; at the end, the number of the last batch."""
        if len(frames) != 3:
            raise ValueError(f"it has {len(frames)} frames, not an empty one and a number")
        peer, _, request = frames
        with self._lock:
            last = self._next - 1
            is_all = request == SNAPSHOT and self._vllm is None
            cached = self._mirror.snapshot("") if is_all else []
            first = int.from_bytes(request, "big")
            answers = [] if is_all else [each for each in self._buffer if each[0] >= first]
        if cached:
            answers.append((last, encode_batch(EventBatch(self._epoch, last, cached))))
        for number, payload in answers:
            self._router.send_multipart([peer, b"", self._topic, encode_number(number), payload])
        end = b"" if self._vllm is not None else encode_batch(EventBatch(self._epoch, last, []))
        self._router.send_multipart([peer, b"", b"", END, end])
