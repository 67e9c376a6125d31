"""What is sent: a batch of events as msgpack, and the words of the replay socket.

A published message has three frames: the topic, the batch's number as eight bytes, big-endian, and the batch. These are
the frames of vLLM's publisher, and so is the form of a request to the replay socket and of its answers.
"""

from __future__ import annotations

import msgspec

from kvframe.routing import EventBatch, from_plain, to_plain

SNAPSHOT = b"snapshot"
"""A request for everything, in the place of the number from which batches are missing."""

END = (-1).to_bytes(8, "big", signed=True)
"""In the place of a number: the answer is complete."""

_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()


def encode_number(number: int) -> bytes:
    """Return a batch's number as a frame."""
    return number.to_bytes(8, "big")


def encode_batch(batch: EventBatch, *, with_tokens: bool = False) -> bytes:
    """Return a batch as msgpack: a map of ``epoch``, ``number`` and ``events``, as ``kvframe.routing.to_plain`` does.

    Args:
        batch: The batch.
        with_tokens: Whether it contains token ids, which an index by keys does not need.
    """
    return _encoder.encode(
        {"epoch": batch.epoch, "number": batch.number, "events": to_plain(batch.events, with_tokens=with_tokens)}
    )


def decode_batch(data: bytes) -> EventBatch:
    """Return the batch that ``encode_batch`` wrote.

    Raises:
        ValueError: The bytes are not a batch.
    """
    try:
        values = _decoder.decode(data)
        epoch, number, events = values["epoch"], values["number"], values["events"]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"a batch of events cannot be read: {error}") from error
    if type(epoch) is not bytes or type(number) is not int:
        raise ValueError(f"a batch of events has the epoch {epoch!r} and the number {number!r}")
    return EventBatch(epoch, number, from_plain(events))
