"""The cases that are measured on a GPU, and the least time of each: bytes over bandwidth, or operations over rate.

Each input is read once and each output written once; of keys and values, those that at least one query sees.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import attrs

from benchmarks.attention.shapes import BFLOAT16_BYTES, FLOAT32_BYTES, Requests, Shape, decodes

KILO = 1024


@attrs.frozen(kw_only=True)
class Ceilings:
    """The limits of a device: the rate of a large copy, read and written, and that of a large bfloat16 product."""

    bytes_per_second: float
    flops_per_second: float


ISSUED = Ceilings(bytes_per_second=4.3e12, flops_per_second=790e12)
"""An H200's limits. The table shows floors for them until a device's own limits are measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(Shape):
    """One layer's attention in one step. Its kind is the heading of its table."""

    @property
    def key(self) -> str:
        """The name in the record."""
        return f"{self.kind}: {self.name}"

    def floor(self, ceilings: Ceilings) -> float:
        """Return the least seconds under these limits."""
        return max(self.num_bytes() / ceilings.bytes_per_second, self.num_flops / ceilings.flops_per_second)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentCase(Case):
    """Decodes over latents by absorbed attention, with the sizes of DeepSeek-V3; a key has a rotated part (rope)."""

    num_heads: int = 128
    latent_size: int = 512
    rope_size: int = 64
    nope_size: int = 128
    head_size_v: int = 128

    def kv_bytes(self) -> int:
        """Return the bytes of the latents."""
        return self.num_keys * (self.latent_size + self.rope_size) * BFLOAT16_BYTES

    def num_bytes(self) -> int:
        """Return the bytes of the latents, the queries and the outputs."""
        sizes = self.nope_size + self.rope_size + self.head_size_v
        return self.kv_bytes() + self.num_queries * self.num_heads * sizes * BFLOAT16_BYTES

    @property
    def num_flops(self) -> int:
        """Operations of both products over latents."""
        return 2 * self.num_pairs * self.num_heads * (2 * self.latent_size + self.rope_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateCase(Case):
    """One token's step of Mamba-2's states in float32, with the sizes of its model of 2.7 billion parameters."""

    num_heads: int = 80
    head_size: int = 64
    state_size: int = 128
    num_flops = 0  # Matrix units do nothing, and five operations for each element take no time.

    def kv_bytes(self) -> int:
        """Return the bytes of the states, which are read and written."""
        return 2 * len(self.requests) * self.num_heads * self.head_size * self.state_size * FLOAT32_BYTES

    def num_bytes(self) -> int:
        """Return the bytes of the states; those of other inputs are few."""
        return self.kv_bytes()


def prompt(length: int) -> Requests:
    """Return one prompt."""
    return ((0, length),)


def cases() -> Iterator[Case]:
    """Yield every case; the most telling ones come first."""
    yield Case(name="16 x 2k", kind="decode", requests=decodes(16, 2 * KILO))
    yield Case(name="64 x 8k", kind="decode", requests=decodes(64, 8 * KILO))
    yield Case(name="1 x 32k", kind="decode", requests=decodes(1, 32 * KILO))
    for length in (8, 2, 32):
        yield Case(name=f"prompt of {length}k", kind="prefill", requests=prompt(length * KILO))
    yield Case(name="window of 1k, prompt of 8k", kind="window", requests=prompt(8 * KILO), window=KILO)
    yield Case(name="window of 1k, decodes 64 x 8k", kind="window", requests=decodes(64, 8 * KILO), window=KILO)
    yield Case(name="chunks of 1k, prompt of 8k", kind="chunked local", requests=prompt(8 * KILO), chunk=KILO)
    yield Case(name="prompt of 8k, its last token alone", kind="decode-only", requests=prompt(8 * KILO), skips=True)
    mixed = (*decodes(64, 4 * KILO), (6 * KILO, 2 * KILO))
    yield Case(name="64 decodes at 4k, 2k more tokens at 6k", kind="mixed", requests=mixed)
    yield LatentCase(name="64 x 8k, 128 heads", kind="MLA decode", requests=decodes(64, 8 * KILO))
    yield StateCase(name="128 requests", kind="Mamba-2 update", requests=decodes(128, 1))
    for format_name, label in (("plain", ""), ("fp8_tensor", ", fp8"), ("int8_token_head", ", int8")):
        for heads, batch, context in itertools.product((32, 64), (1, 16, 128), (1, 8, 64)):
            if format_name != "int8_token_head" or (heads, context) == (32, 8):
                name = f"{batch} x {context}k, {heads} of 8 heads{label}"
                requests = decodes(batch, context * KILO)
                yield Case(name=name, kind="decode, all", requests=requests, num_heads=heads, format=format_name)


SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64}
TINY = (
    Case(name="3 x 40", kind="tiny", requests=decodes(3, 40), **SMALL),
    Case(name="prompt of 70", kind="tiny", requests=prompt(70), **SMALL),
    Case(name="window", kind="tiny", requests=prompt(70), window=9, **SMALL),
    Case(name="chunks", kind="tiny", requests=prompt(70), chunk=16, **SMALL),
    Case(name="last token", kind="tiny", requests=prompt(70), skips=True, **SMALL),
    LatentCase(name="latents", kind="tiny", requests=decodes(3, 40), num_heads=4, latent_size=32, rope_size=8),
)
"""Small cases that try the script on any device."""
