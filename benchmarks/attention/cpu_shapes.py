"""The steps that attention on a CPU is measured on, their inputs, and how a system takes its turn on one.

kvframe's and vLLM's processes both import this file, so torch is the only package that it needs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention.shapes import SEED, Shape
from benchmarks.harness.process import timed

CALLS = 3
SLOW_SECONDS = 0.1
"""A step that takes longer is timed once in a turn."""

Step = tuple[Callable[[], object], Callable[[], torch.Tensor]]
"""A system's two parts of a step: a function that makes the metadata, and one that attends with the last metadata."""


def standard_shapes() -> tuple[Shape, ...]:
    """Return the shapes that are measured by default."""
    decode = ((2047, 1),) * 16
    mixed = (*((2047, 1),) * 15, (1024, 512))
    found = []
    for dtype in ("float32", "bfloat16"):
        found += [
            Shape(name=f"decode-16x2048-{dtype}", kind="decode", requests=decode, dtype=dtype),
            Shape(name=f"decode-16x2048-page128-{dtype}", kind="decode", requests=decode, dtype=dtype, block_size=128),
            Shape(name=f"decode-1x32768-{dtype}", kind="decode", requests=((32767, 1),), dtype=dtype),
            Shape(name=f"decode-64x512-{dtype}", kind="decode", requests=((511, 1),) * 64, dtype=dtype),
            Shape(name=f"decode-16x2048-window1024-{dtype}", kind="decode", requests=decode, dtype=dtype, window=1024),
            Shape(name=f"prefill-2048-{dtype}", kind="prefill", requests=((0, 2048),), dtype=dtype),
            Shape(name=f"mixed-15x2048-512-{dtype}", kind="mixed", requests=mixed, dtype=dtype),
        ]
    return tuple(found)


def tiny_shapes() -> tuple[Shape, ...]:
    """Return small shapes that try the script."""
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32}
    requests = ((40, 1), (17, 1), (0, 1))
    mixed = ((40, 1), (0, 9), (17, 5))
    return (
        Shape(name="tiny-decode", kind="decode", requests=requests, dtype="float32", **sizes),
        Shape(name="tiny-window", kind="decode", requests=requests, window=20, **sizes),
        Shape(name="tiny-mixed", kind="mixed", requests=mixed, dtype="float32", **sizes),
    )


def num_pages(shape: Shape) -> int:
    """Return the pages of the pool; the first is the null page."""
    return 1 + sum(-(-length // shape.block_size) for length in shape.seq_lens)


def block_table(shape: Shape) -> torch.Tensor:
    """Return ``[num_reqs, max_blocks], int32``: scattered pages, the same for every system.

    The null page stands for blocks that lie before a request's window.
    """
    generator = torch.Generator().manual_seed(SEED)
    ids = (torch.randperm(num_pages(shape) - 1, generator=generator) + 1).to(torch.int32)
    counts = [-(-length // shape.block_size) for length in shape.seq_lens]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, (part, request) in enumerate(zip(ids.split(counts), shape.requests, strict=True)):
        first = shape.first_seen(*request) // shape.block_size
        table[row, first : len(part)] = part[first:]
    return table


def slots(shape: Shape, table: torch.Tensor) -> torch.Tensor:
    """Return each key's slot, ``[num_kv_tokens], int64``; it lies in the null page if no query sees the key."""
    rows = []
    for row, length in enumerate(shape.seq_lens):
        tokens = torch.arange(length)
        rows.append(table[row].long()[tokens // shape.block_size] * shape.block_size + tokens % shape.block_size)
    return torch.cat(rows)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The random inputs of a step, and its right output. Every system draws the same numbers.

    Attributes:
        key: ``[num_kv_tokens, num_kv_heads, head_size]``, one request after the other.
        value: The same shape.
        query: ``[num_new_tokens, num_heads, head_size]``.
        expected: Dense attention of each request, ``[num_new_tokens, num_heads, head_size], float32``.
    """

    key: torch.Tensor
    value: torch.Tensor
    query: torch.Tensor
    expected: torch.Tensor

    @classmethod
    @functools.lru_cache(1)
    def draw(cls, shape: Shape) -> Inputs:
        """Draw the inputs of a shape; those of the last shape are kept."""
        generator = torch.Generator().manual_seed(SEED)

        def normal(num_tokens: int, num_heads: int) -> torch.Tensor:
            drawn = torch.randn(num_tokens, num_heads, shape.head_size, generator=generator)
            return drawn.to(shape.torch_dtype)

        num_tokens = sum(shape.seq_lens)
        key, value = normal(num_tokens, shape.num_kv_heads), normal(num_tokens, shape.num_kv_heads)
        query = normal(shape.num_queries, shape.num_heads)
        return cls(key, value, query, _dense(shape, key, value, query))


def _dense(shape: Shape, key: torch.Tensor, value: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    outputs = []
    parts = query.split([new for _, new in shape.requests]), key.split(shape.seq_lens), value.split(shape.seq_lens)
    for (computed, new), *tensors in zip(shape.requests, *parts, strict=True):
        position, token = shape.positions(computed, new)[:, None], torch.arange(computed + new)
        seen = (token <= position) & (token > position - shape.num_seen(position))
        queries, keys, values = (each.float().transpose(0, 1)[None] for each in tensors)
        result = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
        outputs.append(result[0].transpose(0, 1))
    return torch.cat(outputs)


def pool_bytes(shape: Shape) -> int:
    """Return the bytes of a shape's pool."""
    token_bytes = 2 * shape.num_kv_heads * shape.head_size * shape.torch_dtype.itemsize
    return num_pages(shape) * shape.block_size * token_bytes


def map_pool(file: int, shape: Shape) -> torch.Tensor:
    """Return a shape's pool, ``[num_bytes], uint8``, in the memory of a file that all processes map.

    On a virtual machine, the place of a pool in memory can double the rate at which it is read.
    """
    return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=pool_bytes(shape), dtype=torch.uint8)


class Refused(Exception):
    """A system does not compute a shape; the message says why."""


def answer_turns(
    prepare: Callable[[Shape, Inputs, torch.Tensor], Step], threads: str, file: str
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that does a system's turn on a shape.

    Args:
        prepare: Writes keys and values into the pool, ``[num_bytes], uint8``, in the system's own layout, and returns
            the step. It raises ``Refused`` if the system does not compute the shape.
        threads: The number of torch's threads.
        file: The descriptor of the pool's memory.
    """
    torch.set_num_threads(int(threads))

    @torch.inference_mode()
    def do_turn(question: dict[str, Any]) -> dict[str, Any]:
        shape = Shape.of(question["shape"])
        inputs = Inputs.draw(shape)
        # No keys and values of the last system stay. All systems mask the unused ends of last pages, but vLLM only as
        # long as they hold numbers.
        pool = map_pool(int(file), shape).zero_()
        try:
            build, attend = prepare(shape, inputs, pool)
        except Refused as reason:
            return {"refused": str(reason)}
        build()
        warm_up, output = timed(attend)
        error = float((output.float() - inputs.expected).abs().max() / inputs.expected.abs().max())
        calls = CALLS if warm_up <= SLOW_SECONDS else 1
        builds = [timed(build)[0] for _ in range(calls)]
        return {"error": error, "seconds": [timed(attend)[0] for _ in range(calls)], "metadata_seconds": builds}

    return do_turn
