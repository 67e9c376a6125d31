"""Steps that are timed: a layer's cache with random keys and values, its metadata, and calls over different pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from kvframe_chunked_local.wrapper import ChunkedLocal
from kvframe_decode_only.wrapper import DecodeOnly
from kvframe_mla.spec import MLASpec

from benchmarks.gpu.cases import Case, LatentCase
from kvframe.attention.request_order import is_ordered, permute
from kvframe.attention.staging import Staging
from kvframe.attention.wrapping import apply_chain
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import KVCacheSpec, LayerSpec, QuerySpec, align_up
from kvframe.contract.wrapper import MetadataWrapper
from kvframe.loading.registry import Registry
from kvframe.selection.chains import WrapperChain, bind_chain
from kvframe.testing.metadata import make_metadata
from kvframe.testing.state import GridSpec

BLOCK_SIZE = 16
ROTATED_BYTES = 256 << 20
"""Keys and values that calls read by turns: several times what the L2 cache of a GPU holds."""

MAX_ROTATION = 128
FILLED_TOKENS = 1 << 16
"""Tokens that are written at a time."""

CHECKED_ROWS = 32
"""Rows of a step that are held against the reference."""

ERROR = 0.02
"""The most that a bfloat16 output may differ from the reference, by norms: operands are rounded to 8 bits."""


def make_layer(case: Case, block_size: int, registry: Registry, dtype: str = "bfloat16") -> LayerSpec:
    """Return a case's layer, as a model has it."""
    spec: KVCacheSpec
    if isinstance(case, LatentCase):
        spec = MLASpec(
            block_size=block_size,
            latent_size=case.latent_size,
            rope_size=case.rope_size,
            head_size_v=case.head_size_v,
            dtype=dtype,
        )
        size = case.nope_size + case.rope_size
    else:
        size = case.head_size
        options = {} if case.format == "plain" else {"format": registry.formats.load(case.format)()}
        spec = GridSpec(
            block_size=block_size,
            num_kv_heads=case.num_kv_heads,
            head_size=size,
            dtype=dtype,
            window=case.window,
            chunk=case.chunk,
            **options,
        )
    query = QuerySpec(num_heads=case.num_heads, head_size=size, scale=size**-0.5)
    return LayerSpec(name="layer", spec=spec, query=query, shares_with="owner" if case.skips else None)


def make_chain(case: Case) -> list[MetadataWrapper]:
    """Return the wrappers of a case's layer."""
    return [*([DecodeOnly()] if case.skips else []), *([ChunkedLocal()] if case.chunk is not None else [])]


class Cache:
    """A layer's pages, block-major as in a pool, filled with random keys and values.

    Attributes:
        views: The state tensors by name, each ``[num_pages, …], device``; page 0 is unowned.
    """

    def __init__(self, layer: LayerSpec, num_pages: int, device: torch.device) -> None:
        """Allocate and fill.

        Args:
            layer: The layer.
            num_pages: Pages, beside the unowned one.
            device: Where.
        """
        assert layer.spec is not None
        self._spec = layer.spec
        page_bytes = layer.spec.block_bytes
        pool = torch.zeros((num_pages + 1) * page_bytes, dtype=torch.uint8, device=device)
        self.views: dict[str, torch.Tensor] = {}
        offset = 0
        for name, tensor in layer.spec.state_tensors().items():
            dtype: torch.dtype = getattr(torch, tensor.dtype)
            strides = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
            self.views[name] = pool.view(dtype).as_strided(
                (num_pages + 1, *tensor.shape), (page_bytes // dtype.itemsize, *strides), offset // dtype.itemsize
            )
            offset += align_up(tensor.num_bytes, 16)

    def fill(self, backend: AttentionBackend, sizes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        """Let a backend write random keys and values to all pages.

        Args:
            backend: It writes as its layers' format says.
            sizes: Of a token's key, and of its value.
            dtype: What they are written in.
        """
        first = next(iter(self.views.values()))
        block_size = self._spec.block_size
        generator = torch.Generator(first.device).manual_seed(1)
        num_tokens = (first.shape[0] - 1) * block_size
        for start in range(0, num_tokens, FILLED_TOKENS):
            slots = torch.arange(start, min(start + FILLED_TOKENS, num_tokens), device=first.device) + block_size
            key, value = (
                torch.randn(len(slots), *size, generator=generator, device=first.device).to(dtype) for size in sizes
            )
            backend.write_kv(key, value, self.views, (slots // block_size, slots % block_size))


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """One step over pages of its own, ready to be called again and again.

    Attributes:
        run: Computes the layer's attention; returns ``[num_rows, num_heads, head_size_v], device``.
        build: Builds the metadata that it reads, on the host; returns it.
        check: Returns how far an output is from the reference, by norms.
    """

    run: Callable[[], torch.Tensor]
    build: Callable[[], Any]
    check: Callable[[torch.Tensor], float]


def rotation(case: Case) -> int:
    """Return over how many sets of pages the calls take turns."""
    return max(1, min(MAX_ROTATION, -(-ROTATED_BYTES // case.kv_bytes())))


def needed_bytes(case: Case) -> int:
    """Return the bytes of all sets of pages."""
    whole = sum(request.seq_len for request in case.requests) / max(1, case.num_keys())
    return int(rotation(case) * case.kv_bytes() * whole)


def make_steps(
    case: Case, backend_class: type[AttentionBackend], registry: Registry, device: torch.device
) -> Iterator[Step]:
    """Yield a case's steps for one backend, as many as the calls take turns over.

    Args:
        case: The case.
        backend_class: The backend; its capabilities cover the layer.
        registry: Where formats are found.
        device: Where it runs.
    """
    block_size = align_up(BLOCK_SIZE, backend_class.capabilities.block_size_multiple)
    dtype = "bfloat16" if "bfloat16" in backend_class.capabilities.dtypes else "float32"
    layer = make_layer(case, block_size, registry, dtype)
    chain, seen, _ = bind_chain(make_chain(case), layer)
    options = backend_class.options_class
    backend = backend_class([seen], device) if options is None else backend_class([seen], device, options())
    host = make_metadata(case.requests, block_size)
    pages_per_step, turns = int(host.block_table.max()), rotation(case)
    cache = Cache(layer, pages_per_step * turns, device)
    cache.fill(backend, _token_sizes(case), getattr(torch, dtype))
    generator = torch.Generator(device).manual_seed(2)
    parameters = {}
    if isinstance(case, LatentCase):
        shape = case.num_heads, case.nope_size + case.head_size_v, case.latent_size
        parameters["kv_up"] = torch.randn(*shape, generator=generator, device=device).to(getattr(torch, dtype)) * 0.05
        backend.bind(seen, parameters)
    assert layer.query is not None
    shape = len(host.slot_mapping), case.num_heads, layer.query.head_size
    query = torch.randn(*shape, generator=generator, device=device).to(getattr(torch, dtype))
    order = torch.randperm(pages_per_step * turns, generator=torch.Generator().manual_seed(2)).to(torch.int32) + 1
    for turn in range(turns):
        ids = order[turn * pages_per_step : (turn + 1) * pages_per_step]
        table = ids[(host.block_table.clamp(min=1) - 1).long()] * (host.block_table > 0)
        metadata = attrs.evolve(host, block_table=table.to(torch.int32))
        yield _make_step(case, layer, seen, chain, backend, cache, parameters, query, metadata)


def _token_sizes(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(case, LatentCase):
        return (1, case.latent_size), (1, case.rope_size)
    return (case.num_kv_heads, case.head_size), (case.num_kv_heads, case.head_size)


def _make_step(
    case: Case,
    layer: LayerSpec,
    seen: LayerSpec,
    chain: WrapperChain,
    backend: AttentionBackend,
    cache: Cache,
    parameters: Mapping[str, torch.Tensor],
    query: torch.Tensor,
    metadata: CommonAttentionMetadata,
) -> Step:
    """Return a step of metadata that lies on the host, where chains and orders are worked out, as in an engine."""
    builder, staging = backend.make_builder(), Staging(query.device)
    wrapped, back = apply_chain(chain, metadata), None
    rows = (metadata.generating_indices_cpu if case.skips else torch.arange(len(query))).to(query.device)
    own = query.index_select(0, rows)
    if builder.batch_order is not None and not is_ordered(builder.batch_order, wrapped):
        wrapped, permutation = permute(wrapped, builder.batch_order)
        own = own.index_select(0, permutation.tokens.to(query.device))
        back = permutation.inverse.to(query.device)
    there = staging.to_device(metadata)

    def build() -> Any:
        return build_on_device(builder, wrapped, staging)

    built = build()

    def run() -> torch.Tensor:
        return backend.forward(seen, own, cache.views, built, None)

    def check(output: torch.Tensor) -> float:
        output = output if back is None else output.index_select(0, back)
        return _error(case, layer, cache, parameters, query, there, rows, output)

    return Step(run=run, build=build, check=check)


def build_on_device(builder: AttentionMetadataBuilder, metadata: CommonAttentionMetadata, staging: Staging) -> Any:
    """Return what a builder makes of metadata that lies on the host, where the layers read it."""
    if not builder.on_host:
        metadata = staging.to_device(metadata)
    (built,) = builder.build_together([(builder, metadata)])
    return builder.finish(staging.to_device(built))


def _error(
    case: Case,
    layer: LayerSpec,
    cache: Cache,
    parameters: Mapping[str, torch.Tensor],
    query: torch.Tensor,
    metadata: CommonAttentionMetadata,
    rows: torch.Tensor,
    output: torch.Tensor,
) -> float:
    """Return the norm of the difference to attention in float32 over the norm of that, of some rows of the step."""
    places = torch.linspace(0, len(rows) - 1, min(CHECKED_ROWS, len(rows))).round().long().unique().tolist()
    starts = metadata.query_start_loc_cpu
    found, exact = [], []
    for place in places:
        row = int(rows[place])
        request = int(torch.searchsorted(starts, row, right=True)) - 1
        position = case.requests[request].seq_len - (int(starts[request + 1]) - row)
        first = 0
        if case.chunk is not None:
            first = position - position % case.chunk
        elif case.window is not None:
            first = max(0, position - case.window + 1)
        key, value = _dense(case, layer, cache, parameters, metadata.block_table[request], first, position + 1)
        found.append(output[place].float())
        exact.append(_attend(query[row].float(), key, value, layer))
    reference = torch.stack(exact)
    return float((torch.stack(found) - reference).norm() / reference.norm())


def _dense(
    case: Case,
    layer: LayerSpec,
    cache: Cache,
    parameters: Mapping[str, torch.Tensor],
    table: torch.Tensor,
    start: int,
    stop: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the tokens ``[start, stop)``, ``[num_tokens, num_heads, size], float32``."""
    assert layer.spec is not None
    size = layer.spec.block_size
    ids = table[start // size : -(-stop // size)].long()
    skipped = start % size
    part = slice(skipped, skipped + stop - start)
    if isinstance(case, LatentCase):
        tokens = cache.views["latent"].index_select(0, ids).flatten(0, 1)[part].float()
        latent, rope = tokens.split([case.latent_size, case.rope_size], dim=-1)
        up = torch.einsum("tl,hdl->thd", latent, parameters["kv_up"].float())
        nope, value = up.split([case.nope_size, case.head_size_v], dim=-1)
        return torch.cat([nope, rope[:, None].expand(-1, case.num_heads, -1)], dim=-1), value
    shape = len(ids), size, case.num_kv_heads, case.head_size
    device = table.device
    out = {name: torch.empty(shape, dtype=torch.float32, device=device) for name in ("k", "v")}
    layer.spec.kv_format.read(cache.views, ids, out)
    return out["k"].flatten(0, 1)[part], out["v"].flatten(0, 1)[part]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    assert layer.query is not None
    group_size = query.shape[0] // key.shape[1]
    key, value = key.repeat_interleave(group_size, dim=1), value.repeat_interleave(group_size, dim=1)
    weights = torch.softmax(torch.einsum("hd,thd->ht", query, key) * layer.query.scale, dim=-1)
    return torch.einsum("ht,thd->hd", weights, value)
