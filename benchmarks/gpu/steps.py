"""Make the timed steps: a layer with random keys and values, its metadata, and calls over different pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from kvframe_chunked_local.wrapper import ChunkedLocal
from kvframe_decode_only.wrapper import DecodeOnly
from kvframe_mla.spec import MLASpec
from kvframe_testing.case import Request
from kvframe_testing.metadata import make_metadata
from kvframe_testing.reference import dense_attention
from kvframe_testing.state import GridSpec, form_of

from benchmarks.gpu.cases import Case, LatentCase
from benchmarks.harness.layers import make_backend, page_views
from kvframe.attention.request_order import is_ordered, permute
from kvframe.attention.staging import Staging
from kvframe.attention.wrapping import apply_chain
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder
from kvframe.contract.formats import PLAIN
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.slots import Slots
from kvframe.contract.specs import KVCacheSpec, LayerSpec, QuerySpec, align_up
from kvframe.contract.wrapper import MetadataWrapper
from kvframe.loading.registry import Registry
from kvframe.selection.choice import bind_chain

BLOCK_SIZE = 16
ROTATED_BYTES = 256 << 20
"""The bytes of keys and values that calls read by turns: several times the L2 cache of a GPU."""

MAX_ROTATION = 128
FILLED_TOKENS = 1 << 16
"""The number of tokens that are written at a time."""

CHECKED_ROWS = 32
"""The number of rows of a step that are compared with the reference."""

ERROR = 0.02
"""The largest error of a bfloat16 output, by norms; its operands are rounded to 8 bits."""


def make_layer(case: Case, block_size: int, registry: Registry, dtype: str = "bfloat16") -> LayerSpec:
    """Return the layer of a case."""
    spec: KVCacheSpec
    pages: dict[str, Any] = {"block_size": block_size, "dtype": dtype}
    size = case.head_size
    if isinstance(case, LatentCase):
        latents: dict[str, Any] = {name: getattr(case, name) for name in ("latent_size", "rope_size", "head_size_v")}
        spec, size = MLASpec(**pages, **latents), case.nope_size + case.rope_size
    else:
        kv_format = PLAIN if case.format == "plain" else registry.formats.load(case.format)()
        sees: dict[str, Any] = {"window": case.window, "chunk": case.chunk}
        spec = GridSpec(num_kv_heads=case.num_kv_heads, head_size=size, format=kv_format, **pages, **sees)
    query = QuerySpec(num_heads=case.num_heads, head_size=size, scale=size**-0.5)
    return LayerSpec(name="layer", spec=spec, query=query, shares_with="owner" if case.skips else None)


def make_chain(case: Case) -> list[MetadataWrapper]:
    """Return the wrappers of the layer of a case."""
    return [*([DecodeOnly()] if case.skips else []), *([ChunkedLocal()] if case.chunk is not None else [])]


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """One step over pages of its own, which can be called any number of times.

    ``run`` returns the layer's attention, ``[num_rows, num_heads, head_size_v], device``; ``build`` builds the metadata
    on the host; ``check`` returns the error of an output, by norms.
    """

    run: Callable[[], torch.Tensor]
    build: Callable[[], Any]
    check: Callable[[torch.Tensor], float]


def rotation(case: Case) -> int:
    """Return the number of sets of pages over which calls take turns."""
    return max(1, min(MAX_ROTATION, -(-ROTATED_BYTES // case.kv_bytes())))


def needed_bytes(case: Case) -> int:
    """Return the bytes of all sets of pages."""
    return rotation(case) * case.kv_bytes() * sum(case.seq_lens) // max(1, case.num_keys)


class PagedLayer:
    """A case's layer on one backend that serves it, with random keys, values and queries.

    ``views`` are the state tensors by name, each ``[num_pages, …], device``; page 0 is the null page. ``query`` is
    ``[num_tokens, num_heads, head_size], device``.
    """

    def __init__(
        self, case: Case, backend_class: type[AttentionBackend], registry: Registry, device: torch.device
    ) -> None:
        """Make the layer and fill its pages."""
        self._case, self._device, self._form = case, device, form_of(backend_class)
        dtype_name = "bfloat16" if "bfloat16" in backend_class.capabilities.dtypes else "float32"
        self._dtype: torch.dtype = getattr(torch, dtype_name)
        self._block_size = align_up(BLOCK_SIZE, backend_class.capabilities.block_size_multiple)
        self._layer = make_layer(case, self._block_size, registry, dtype_name)
        self._chain, self._seen, _ = bind_chain(make_chain(case), self._layer)
        self._backend = make_backend(backend_class, self._seen, device)
        self._host = make_metadata([Request(*request) for request in case.requests], self._block_size)
        self._num_pages = rotation(case) * int(self._host.block_table.max())
        assert self._layer.spec is not None
        assert self._layer.query is not None
        num_bytes = (self._num_pages + 1) * self._layer.spec.block_bytes
        self.views = page_views(self._layer.spec, torch.zeros(num_bytes, dtype=torch.uint8, device=device))
        self._fill()
        self._generator = torch.Generator(device).manual_seed(2)
        self._parameters = self._form.draw_parameters(self._layer, self._draw)
        if self._parameters:
            self._backend.bind(self._seen, self._parameters)
        self.query = self._draw(len(self._host.slot_mapping), case.num_heads, self._layer.query.head_size)

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device=self._device).to(self._dtype)

    def _fill(self) -> None:
        """Let the backend write random keys and values to all pages but the first."""
        size, spec, self._generator = self._block_size, self._layer.spec, torch.Generator(self._device).manual_seed(1)
        assert spec is not None
        end = (self._num_pages + 1) * size
        for start in range(size, end, FILLED_TOKENS):
            slots = torch.arange(start, min(start + FILLED_TOKENS, end), device=self._device)
            key, value = self._form.draw(spec, len(slots), self._draw)
            self._backend.write_kv(key, value, self.views, Slots(slots, size))

    def steps(self) -> Iterator[Step]:
        """Yield the steps over which calls take turns; each has pages of its own."""
        host, turns = self._host, rotation(self._case)
        order = torch.randperm(self._num_pages, generator=torch.Generator().manual_seed(2)).to(torch.int32) + 1
        for ids in order.split(self._num_pages // turns):
            table = ids[(host.block_table.clamp(min=1) - 1).long()] * (host.block_table > 0)
            yield self._step(attrs.evolve(host, block_table=table.to(torch.int32)))

    def _step(self, metadata: CommonAttentionMetadata) -> Step:
        """Return a step for metadata on the host, which is wrapped and ordered there, as in an engine."""
        builder, staging = self._backend.make_builder(), Staging(self._device)
        wrapped, back = apply_chain(self._chain, metadata), None
        rows = metadata.generating_indices_cpu if self._case.skips else torch.arange(len(self.query))
        assert rows is not None
        own = self.query.index_select(0, rows.to(self._device))
        if builder.batch_order is not None and not is_ordered(builder.batch_order, wrapped):
            wrapped, permutation = permute(wrapped, builder.batch_order)
            own = own.index_select(0, permutation.tokens.to(self._device))
            back = permutation.inverse.to(self._device)

        def build() -> Any:
            return build_on_device(builder, wrapped, staging)

        built = build()

        def run() -> torch.Tensor:
            return self._backend.attend(self._seen, own, self.views, built)

        def check(output: torch.Tensor) -> float:
            return self._error(metadata, rows, output if back is None else output.index_select(0, back))

        return Step(run=run, build=build, check=check)

    def _error(self, metadata: CommonAttentionMetadata, rows: torch.Tensor, output: torch.Tensor) -> float:
        """Return the error of some rows: the norm of the difference to float32 attention over that attention's norm."""
        case, query_side = self._case, self._layer.query
        assert query_side is not None
        places = torch.linspace(0, len(rows) - 1, min(CHECKED_ROWS, len(rows))).round().long().unique().tolist()
        starts, tables = metadata.query_start_loc_cpu, metadata.block_table.to(self._device)
        outputs, exact = [], []
        for place in places:
            row = int(rows[place])
            request = int(torch.searchsorted(starts, row, right=True)) - 1
            position = torch.tensor(case.seq_lens[request] - (int(starts[request + 1]) - row))
            end = int(position) + 1
            key, value = self._dense(tables[request], end - int(case.num_seen(position)), end)
            visible = torch.ones(1, len(key), dtype=torch.bool, device=self._device)
            exact.append(dense_attention(query_side, self.query[row : row + 1].float(), key, value, visible)[0])
            outputs.append(output[place].float())
        reference = torch.stack(exact)
        return float((torch.stack(outputs) - reference).norm() / reference.norm())

    def _dense(self, table: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the tokens ``[start, stop)``, ``[num_tokens, num_heads, size], float32``."""
        case, size, spec = self._case, self._block_size, self._layer.spec
        assert spec is not None
        ids = table[start // size : -(-stop // size)].long()
        part = slice(start % size, start % size + stop - start)
        if isinstance(case, LatentCase):
            latents = self.views["latent"].index_select(0, ids).flatten(0, 1)[part].float()
            key, value = latents[:, None].split([case.latent_size, case.rope_size], dim=-1)
        else:
            shape = len(ids), size, case.num_kv_heads, case.head_size
            out = {name: torch.empty(shape, dtype=torch.float32, device=self._device) for name in ("k", "v")}
            spec.kv_format.read(self.views, ids, out)
            key, value = out["k"].flatten(0, 1)[part], out["v"].flatten(0, 1)[part]
        return self._form.expand(
            self._layer, key, value, {name: parameter.float() for name, parameter in self._parameters.items()}
        )


def build_on_device(builder: AttentionMetadataBuilder, metadata: CommonAttentionMetadata, staging: Staging) -> Any:
    """Build metadata from a batch on the host, and copy it to the device."""
    if builder.on_host is None:
        metadata = staging.to_device(metadata)
    (built,) = builder.build_together([(builder, metadata)])
    return builder.finish(staging.to_device(built))
