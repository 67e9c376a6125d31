"""The steps that attention is measured on, and the memory that engines share. Torch is the only package needed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention.shapes import SEED, Shape


def standard_shapes() -> tuple[Shape, ...]:
    """Return what is measured by default."""
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
    """Return shapes to try the script on, not to measure."""
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
    """Return ``[num_reqs, max_blocks], int32``: scattered pages, and the null page before what a window reaches.

    Every engine reads the same pages.
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
    """Return ``[num_kv_tokens], int64``: where each token's key lies, in the null page if no query sees it."""
    rows = []
    for row, length in enumerate(shape.seq_lens):
        tokens = torch.arange(length)
        rows.append(table[row].long()[tokens // shape.block_size] * shape.block_size + tokens % shape.block_size)
    return torch.cat(rows)


class Buffers:
    """The tensors of a shape in memory that processes share, so that each engine reads the very same bytes of it.

    Attributes:
        pool: ``[num_bytes], uint8``: the pages; the engine whose turn it is writes them in its own layout.
        key: ``[num_kv_tokens, num_kv_heads, head_size]``: request after request.
        value: Likewise.
        query: ``[num_new_tokens, num_heads, head_size]``.
        output: The same shape: what an engine computed.
    """

    def __init__(self, file: int, shape: Shape) -> None:
        """Map the parts.

        Args:
            file: Descriptor of memory of ``num_bytes`` or more.
            shape: The step.
        """
        memory = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=self.num_bytes(shape), dtype=torch.uint8)
        starts = iter(memory.split([-(-num_bytes // 4096) * 4096 for _, num_bytes in self._parts(shape)]))
        self.pool, self.key, self.value, self.query, self.output = (
            start[:num_bytes].view(shape.torch_dtype if len(size) > 1 else torch.uint8).view(size)
            for start, (size, num_bytes) in zip(starts, self._parts(shape), strict=True)
        )

    @classmethod
    def num_bytes(cls, shape: Shape) -> int:
        """Return the bytes that they take."""
        return sum(-(-num_bytes // 4096) * 4096 for _, num_bytes in cls._parts(shape))

    @staticmethod
    def _parts(shape: Shape) -> list[tuple[tuple[int, ...], int]]:
        """Return each tensor's size, and its bytes."""
        item = shape.torch_dtype.itemsize
        key = sum(shape.seq_lens), shape.num_kv_heads, shape.head_size
        query = shape.num_queries, shape.num_heads, shape.head_size
        pool = 2 * num_pages(shape) * shape.block_size * shape.num_kv_heads * shape.head_size * item
        return [((pool,), pool), *((size, math.prod(size) * item) for size in (key, key, query, query))]

    def draw(self) -> None:
        """Fill keys, values and queries at random."""
        generator = torch.Generator().manual_seed(SEED)
        for tensor in (self.key, self.value, self.query):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


def reference(shape: Shape, buffers: Buffers) -> torch.Tensor:
    """Return what the step's attention is, ``[num_new_tokens, num_heads, head_size], float32``; dense, one by one."""
    outputs = []
    queries = buffers.query.split([new for _, new in shape.requests])
    keys, values = buffers.key.split(shape.seq_lens), buffers.value.split(shape.seq_lens)
    for (computed, new), *tensors in zip(shape.requests, queries, keys, values, strict=True):
        position, token = shape.positions(computed, new)[:, None], torch.arange(computed + new)
        seen = (token <= position) & (token > position - shape.num_seen(position))
        query, key, value = (each.float().transpose(0, 1)[None] for each in tensors)
        result = scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        outputs.append(result[0].transpose(0, 1))
    return torch.cat(outputs)
