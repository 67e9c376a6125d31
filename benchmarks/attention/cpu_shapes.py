"""The steps that attention is measured on, and what is asked of an engine. Torch is the only package needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

SEED = 11


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer's step.

    Attributes:
        name: For ``--shape`` and the results.
        kind: ``decode``, ``prefill`` or ``mixed``: what the results compare it with.
        requests: Of each request, the tokens computed before and the new ones.
        dtype: Of queries, keys and values.
        block_size: Tokens per page.
        window: Tokens that a query sees, its own included; None for all before it.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_size: Of keys and values.
    """

    name: str
    kind: str
    requests: tuple[tuple[int, int], ...]
    dtype: str
    block_size: int = 16
    window: int | None = None
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128

    @classmethod
    def of(cls, values: dict[str, Any]) -> Shape:
        """Return the shape that ``dataclasses.asdict`` returned, perhaps by way of JSON."""
        return cls(**{**values, "requests": tuple((computed, new) for computed, new in values["requests"])})

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each request after the step."""
        return [computed + new for computed, new in self.requests]

    @property
    def num_new_tokens(self) -> int:
        """Rows of the query."""
        return sum(new for _, new in self.requests)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens with keys and values, those that a window hides from all queries included."""
        return sum(self.seq_lens)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: keys and values of a block of one layer."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.torch_dtype.itemsize

    @property
    def num_pages(self) -> int:
        """Pages of the pool; the first is the null page."""
        return 1 + sum(-(-length // self.block_size) for length in self.seq_lens)

    @property
    def read_bytes(self) -> int:
        """Bytes of the keys and values that some query sees: what has to be read at least."""
        tokens = sum(length - self._first_seen(computed) for (computed, _), length in self._requests())
        return tokens * self.page_bytes // self.block_size

    @property
    def num_flops(self) -> int:
        """Floating-point operations of the two matrix products, on what queries see alone."""
        seen = 0
        for computed, new in self.requests:
            limit = computed + new if self.window is None else self.window
            seen += sum(min(position + 1, limit) for position in range(computed, computed + new))
        return 4 * seen * self.num_heads * self.head_size

    def block_table(self) -> torch.Tensor:
        """Return ``[num_reqs, max_blocks], int32``: scattered pages, and the null page where a window is past.

        Every engine reads the same pages.
        """
        generator = torch.Generator().manual_seed(SEED)
        ids = (torch.randperm(self.num_pages - 1, generator=generator) + 1).to(torch.int32)
        counts = [-(-length // self.block_size) for length in self.seq_lens]
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, (part, (computed, _)) in enumerate(zip(ids.split(counts), self.requests, strict=True)):
            first = self._first_seen(computed) // self.block_size
            table[row, first : len(part)] = part[first:]
        return table

    def slots(self, table: torch.Tensor) -> torch.Tensor:
        """Return ``[num_kv_tokens], int64``: where each token's key lies; slots of the null page where it is past."""
        rows = []
        for row, length in enumerate(self.seq_lens):
            tokens = torch.arange(length)
            rows.append(table[row].long()[tokens // self.block_size] * self.block_size + tokens % self.block_size)
        return torch.cat(rows)

    def _first_seen(self, computed: int) -> int:
        return 0 if self.window is None else max(0, computed + 1 - self.window)

    def _requests(self) -> Iterator[tuple[tuple[int, int], int]]:
        return zip(self.requests, self.seq_lens, strict=True)


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
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32}
    requests = ((40, 1), (17, 1), (0, 1))
    mixed = ((40, 1), (0, 9), (17, 5))
    return (
        Shape(name="tiny-decode", kind="decode", requests=requests, dtype="float32", **sizes),
        Shape(name="tiny-window", kind="decode", requests=requests, dtype="bfloat16", window=20, **sizes),
        Shape(name="tiny-mixed", kind="mixed", requests=mixed, dtype="float32", **sizes),
    )


class Buffers:
    """The tensors of a shape in memory that processes share, so that each engine reads the very same bytes of it.

    Attributes:
        pool: ``[num_pages * page_bytes], uint8``: the pages; whose turn it is writes them in its own layout.
        key: ``[num_kv_tokens, num_kv_heads, head_size]``: request after request.
        value: Likewise.
        query: ``[num_new_tokens, num_heads, head_size]``.
        output: The same shape: what an engine computed.
    """

    def __init__(self, file: int, shape: Shape) -> None:
        """Map the parts.

        Args:
            file: Descriptor of memory that has room (``num_bytes``).
            shape: The step.
        """
        memory = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=self.num_bytes(shape), dtype=torch.uint8)
        parts = iter(memory.split(self._sizes(shape)))
        tokens, kv = (shape.num_new_tokens, shape.num_heads), (shape.num_kv_tokens, shape.num_kv_heads)

        def typed(size: Sequence[int]) -> torch.Tensor:
            num_bytes = size[0] * size[1] * shape.head_size * shape.torch_dtype.itemsize
            return next(parts)[:num_bytes].view(shape.torch_dtype).view(*size, shape.head_size)

        self.pool = next(parts)[: shape.num_pages * shape.page_bytes]
        self.key, self.value, self.query, self.output = typed(kv), typed(kv), typed(tokens), typed(tokens)

    @classmethod
    def num_bytes(cls, shape: Shape) -> int:
        """Return the bytes that they take."""
        return sum(cls._sizes(shape))

    @staticmethod
    def _sizes(shape: Shape) -> list[int]:
        key = shape.num_kv_tokens * shape.num_kv_heads * shape.head_size * shape.torch_dtype.itemsize
        query = shape.num_new_tokens * shape.num_heads * shape.head_size * shape.torch_dtype.itemsize
        sizes = [shape.num_pages * shape.page_bytes, key, key, query, query]
        return [-(-size // 4096) * 4096 for size in sizes]

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
    for (computed, new), query, key, value in zip(shape.requests, queries, keys, values, strict=True):
        position, token = torch.arange(computed, computed + new)[:, None], torch.arange(computed + new)
        seen = token <= position
        if shape.window is not None:
            seen &= token > position - shape.window
        heads = [each.float().transpose(0, 1)[None] for each in (query, key, value)]
        result = scaled_dot_product_attention(*heads, attn_mask=seen, enable_gqa=True)
        outputs.append(result[0].transpose(0, 1))
    return torch.cat(outputs)


@dataclasses.dataclass(frozen=True)
class Step:
    """A shape that an engine has set up.

    Attributes:
        build: Makes the step's metadata from what the engine knows of the batch.
        attend: Computes attention with the metadata that ``build`` returned last, into the output buffer or not.
    """

    build: Callable[[], Any]
    attend: Callable[[], torch.Tensor]


class Engine(Protocol):
    """An engine's attention."""

    def describe(self) -> dict[str, str]:
        """Return the versions that its figures depend on."""

    def why_not(self, shape: Shape) -> str:
        """Return in one sentence why it cannot compute a step; empty if it can."""

    def prepare(self, shape: Shape, buffers: Buffers) -> Step:
        """Write keys and values to the pool, in the engine's layout and by its own code, and set up the step."""
