"""What is measured on a GPU, and the least time that each case can take: bytes over bandwidth, operations over rate.

Each input is read once and each output written once; of keys and values, those that some query sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from kvframe.contract.formats import ITEM_BYTES
from kvframe.testing.case import Request

KILO = 1024


@attrs.frozen(kw_only=True)
class Ceilings:
    """What the device can do at most.

    Attributes:
        bytes_per_second: Of a large copy on the device, bytes read and bytes written together.
        flops_per_second: Of a large product of bfloat16 matrices.
    """

    bytes_per_second: float
    flops_per_second: float


ISSUED = Ceilings(bytes_per_second=4.3e12, flops_per_second=790e12)
"""An H200's, for which the floors in the table are given until a device's own are measured."""


@attrs.frozen(kw_only=True)
class Case:
    """One layer's attention in one step.

    Attributes:
        name: For the results.
        group: The table that it stands in.
        requests: The batch.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_size: Elements of a query, key or value vector.
        window: Tokens that a query sees; None for all.
        chunk: Tokens of a chunk that queries stay within, by the wrapper ``chunked_local``; None for no chunks.
        skips: Whether only generating tokens are computed, by the wrapper ``decode_only``, of a shared cache.
        format: The registered name of how keys and values are stored.
    """

    name: str
    group: str
    requests: tuple[Request, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    window: int | None = None
    chunk: int | None = None
    skips: bool = False
    format: str = "plain"

    def num_pairs(self) -> int:
        """Return how many pairs of a query and a key there are that it sees."""
        return sum(int(self._seen(request).sum()) for request in self.requests)

    def num_keys(self) -> int:
        """Return how many keys any query sees, over all requests."""
        total = 0
        for request in self.requests:
            seen = self._seen(request)
            total += request.seq_len - (request.seq_len - len(seen) - (int(seen[0]) - 1))
        return total

    def num_queries(self) -> int:
        """Return how many queries are computed."""
        return sum(len(self._seen(request)) for request in self.requests)

    def _seen(self, request: Request) -> Any:
        """Return how many keys each query that is computed sees."""
        first = request.seq_len - (request.num_generating if self.skips else request.num_new)
        seen = np.arange(first, request.seq_len) + 1
        if self.chunk is not None:
            return (seen - 1) % self.chunk + 1
        return seen if self.window is None else np.minimum(seen, self.window)

    def num_bytes(self) -> int:
        """Return the bytes that have to be moved."""
        return self.kv_bytes() + 2 * self.num_queries() * self.num_heads * self.head_size * ITEM_BYTES["bfloat16"]

    def kv_bytes(self) -> int:
        """Return the bytes of the keys and values that are read."""
        size = 1 if self.format != "plain" else ITEM_BYTES["bfloat16"]
        return 2 * self.num_keys() * self.num_kv_heads * self.head_size * size

    def num_flops(self) -> int:
        """Return the operations of both products."""
        return 4 * self.num_pairs() * self.num_heads * self.head_size

    def floor(self, ceilings: Ceilings) -> float:
        """Return the least seconds that it can take."""
        return max(self.num_bytes() / ceilings.bytes_per_second, self.num_flops() / ceilings.flops_per_second)


@attrs.frozen(kw_only=True)
class LatentCase(Case):
    """Decodes over latents, in absorbed attention; sizes as in DeepSeek-V3.

    Attributes:
        latent_size: Elements of a latent.
        rope_size: Elements of the rotated part of a key.
        nope_size: Elements of the other part.
        head_size_v: Elements of a value.
    """

    num_heads: int = 128
    latent_size: int = 512
    rope_size: int = 64
    nope_size: int = 128
    head_size_v: int = 128

    def kv_bytes(self) -> int:
        """Return the bytes of the latents."""
        return self.num_keys() * (self.latent_size + self.rope_size) * ITEM_BYTES["bfloat16"]

    def num_bytes(self) -> int:
        """Return the bytes of the latents, the queries and the outputs."""
        sizes = self.nope_size + self.rope_size + self.head_size_v
        return self.kv_bytes() + self.num_queries() * self.num_heads * sizes * ITEM_BYTES["bfloat16"]

    def num_flops(self) -> int:
        """Return the operations of both products over latents."""
        return 2 * self.num_pairs() * self.num_heads * (2 * self.latent_size + self.rope_size)


@attrs.frozen(kw_only=True)
class StateCase(Case):
    """One token's step of Mamba-2's states in float32, sizes as in its model of 2.7 billion parameters.

    Attributes:
        head_size: Elements of a head.
        state_size: Elements of the state of each.
    """

    num_heads: int = 80
    head_size: int = 64
    state_size: int = 128

    def kv_bytes(self) -> int:
        """Return the bytes of the states, each read and written."""
        states = len(self.requests) * self.num_heads * self.head_size * self.state_size
        return 2 * states * ITEM_BYTES["float32"]

    def num_bytes(self) -> int:
        """Return these bytes: the others are few."""
        return self.kv_bytes()

    def num_flops(self) -> int:
        """Return the operations: five for each element of a state, and not on the matrix units."""
        return 0


def decodes(batch: int, context: int) -> tuple[Request, ...]:
    """Return requests of one new token each."""
    return (Request(context - 1, 1),) * batch


def prompt(length: int) -> tuple[Request, ...]:
    """Return one prompt."""
    return (Request(0, length),)


def cases() -> Iterator[Case]:
    """Yield every case, the ones that floors are known of first."""
    yield Case(name="16 x 2k", group="decode", requests=decodes(16, 2 * KILO))
    yield Case(name="64 x 8k", group="decode", requests=decodes(64, 8 * KILO))
    yield Case(name="1 x 32k", group="decode", requests=decodes(1, 32 * KILO))
    for length in (8, 2, 32):
        yield Case(name=f"prompt of {length}k", group="prefill", requests=prompt(length * KILO))
    yield Case(name="window of 1k, prompt of 8k", group="window", requests=prompt(8 * KILO), window=KILO)
    yield Case(name="window of 1k, decodes 64 x 8k", group="window", requests=decodes(64, 8 * KILO), window=KILO)
    yield Case(name="chunks of 1k, prompt of 8k", group="chunked local", requests=prompt(8 * KILO), chunk=KILO)
    yield Case(name="prompt of 8k, its last token alone", group="decode-only", requests=prompt(8 * KILO), skips=True)
    mixed = (*decodes(64, 4 * KILO), Request(6 * KILO, 2 * KILO))
    yield Case(name="64 decodes at 4k, 2k more tokens at 6k", group="mixed", requests=mixed)
    yield LatentCase(name="64 x 8k, 128 heads", group="MLA decode", requests=decodes(64, 8 * KILO))
    yield StateCase(name="128 requests", group="Mamba-2 update", requests=decodes(128, 1))
    for stored, label in (("plain", ""), ("fp8_tensor", ", fp8"), ("int8_token_head", ", int8")):
        for heads in (32, 64):
            for batch in (1, 16, 128):
                for context in (1, 8, 64):
                    if stored == "int8_token_head" and (heads, context) != (32, 8):
                        continue
                    name = f"{batch} x {context}k, {heads} of 8 heads{label}"
                    requests = decodes(batch, context * KILO)
                    yield Case(name=name, group="decode, all", requests=requests, num_heads=heads, format=stored)


TINY = (
    Case(name="3 x 40", group="tiny", requests=decodes(3, 40), num_heads=4, num_kv_heads=2, head_size=64),
    Case(name="prompt of 70", group="tiny", requests=prompt(70), num_heads=4, num_kv_heads=2, head_size=64),
    Case(name="window", group="tiny", requests=prompt(70), num_heads=4, num_kv_heads=2, head_size=64, window=9),
    Case(name="chunks", group="tiny", requests=prompt(70), num_heads=4, num_kv_heads=2, head_size=64, chunk=16),
    Case(name="last token", group="tiny", requests=prompt(70), num_heads=4, num_kv_heads=2, head_size=64, skips=True),
    LatentCase(name="latents", group="tiny", requests=decodes(3, 40), num_heads=4, latent_size=32, rope_size=8),
)
"""For trying the script, on any device."""
