"""A mirror of the cache in an outside router: it is made from events only, and computes keys by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache

from kvframe.cache.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent

SECRET = bytes(range(32))


def hashed(secret: bytes, person: str, *parts: bytes, tail: bytes = b"") -> bytes:
    message = b"".join(len(part).to_bytes(8, "little") + part for part in parts) + tail
    return hashlib.blake2b(message, digest_size=32, key=secret, person=person.encode()).digest()


@cache
def _key(tokens: tuple[int, ...], salt: str, encoder: tuple[int, bytes] | None, secret: bytes) -> bytes:
    inputs = b""
    if encoder is not None:
        parts = (b"encoder", encoder[1], encoder[0].to_bytes(8, "little"))
        inputs = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    tail = b"".join(token.to_bytes(4, "little") for token in tokens)
    return hashed(secret, "kvframe.prefix.1", salt.encode(), inputs, tail=tail)


def key_of_tokens(
    tokens: Sequence[int], salt: str = "", encoder: tuple[int, bytes] | None = None, secret: bytes = SECRET
) -> bytes:
    """Return the key of a prefix after an encoder's input with this number of tokens and this content."""
    return _key(tuple(tokens), salt, encoder, secret)


@cache
def key_of_input(num_tokens: int, encoder: tuple[int, bytes], salt: str = "") -> bytes:
    """Return the key of the first tokens of an encoder's input."""
    numbers = [number.to_bytes(8, "little") for number in (encoder[0], num_tokens)]
    return hashed(SECRET, "kvframe.inputs.1", salt.encode(), b"encoder", encoder[1], *numbers)


class Mirror:
    """The blocks that can be found according to events: for each, its group and key, and the data of its event.

    It raises for events that are out of order: a block that is stored twice, or removed without being stored.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, bytes], BlocksStored] = {}
        self.num_events = 0

    def replay(self, events: Iterable[CacheEvent]) -> None:
        for event in events:
            self.num_events += 1
            if isinstance(event, BlocksStored | BlocksRemoved) and event.medium != "device":
                continue
            if isinstance(event, BlocksStored):
                self._check(event)
                for key in event.keys:
                    assert (event.group, key) not in self.blocks, "stored twice"
                    self.blocks[event.group, key] = event
            elif isinstance(event, BlocksRemoved):
                assert event.keys
                for key in event.keys:
                    del self.blocks[event.group, key]
            else:
                assert isinstance(event, CacheCleared)
                self.blocks.clear()

    def _check(self, event: BlocksStored) -> None:
        assert event.keys
        assert "device" == event.medium
        if event.sequence == "tokens":
            assert len(event.tokens) == event.block_size * len(event.keys)
