"""A case's step, in a real paged cache that is NaN wherever a backend may not look.

That is: other layers' parts of a page, tokens that are not live, the null page, free pages, the ends of blocks. One
read of those shows in the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.attention.backend import AttentionBackend, AttentionMetadataBuilder
from kvframe.attention.copies import CopyScratch, make_backend
from kvframe.attention.metadata import NO_EXTENSIONS, SEQ_STARTS, Axis, CommonAttentionMetadata, Extension
from kvframe.attention.nested import replace_tensors
from kvframe.attention.order import is_ordered, permute
from kvframe.attention.padding import pad_metadata
from kvframe.attention.relative_bias import RELATIVE_BIAS
from kvframe.attention.staging import HOST, Staging
from kvframe.attention.step import StepBatch, build_metadata
from kvframe.attention.wrapper import DROPS_TOKENS, WrapperChain, apply_chain, bind_chain
from kvframe.cache.block_table import BlockTable
from kvframe.cache.manager import KVCacheManager
from kvframe.cache.storage import KVCacheStorage
from kvframe.formats import PLAIN
from kvframe.groups import Grouping, group_layers
from kvframe.plan import KVCachePlan, plan_cache
from kvframe.specs import LayerSpec
from kvframe.testing.case import Case, Request
from kvframe.testing.formats import round_trip
from kvframe.testing.laws import ConformanceError

_SPREAD = 1.5


@attrs.frozen(kw_only=True, eq=False)
class Inputs:
    """One request's tensors on the host, in the dtype that a model computes in.

    Attributes:
        query: ``[num_new, num_heads, head_size]``.
        key: ``[seq_len, …]``: what is stored, as the case's form gives it to ``write_kv``.
        value: ``[seq_len, …]``: likewise.
        read_key: ``[seq_len, …]``: what the layer's format makes of it; of a plain one the same.
        read_value: ``[seq_len, …]``: likewise.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    read_key: torch.Tensor
    read_value: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class Learned:
    """The layer's learned tensors on the host, in the dtype that a model computes in.

    Attributes:
        sinks: ``[num_heads]``: sink logits; None for none.
        parameters: What the backend is given with ``bind``, by name.
    """

    sinks: torch.Tensor | None
    parameters: Mapping[str, torch.Tensor]

    @classmethod
    def draw(cls, case: Case, generator: torch.Generator) -> Learned:
        """Return tensors drawn at random."""
        query = case.query

        def draw(*shape: int) -> torch.Tensor:
            return _SPREAD * torch.randn(*shape, generator=generator).to(case.query_dtype)

        sinks = draw(query.num_heads) if query.has_sinks else None
        parameters = case.form.draw_parameters(case.layer, draw)
        if query.relative_bias is not None:
            parameters[RELATIVE_BIAS] = draw(query.relative_bias.num_buckets, query.num_heads)
        return cls(sinks=sinks, parameters=parameters)

    def to(self, target: torch.device | torch.dtype) -> Learned:
        """Return the tensors in another place or dtype."""
        return Learned(
            sinks=None if self.sinks is None else self.sinks.to(target),
            parameters={name: tensor.to(target) for name, tensor in self.parameters.items()},
        )


@attrs.frozen(kw_only=True, eq=False)
class Output:
    """What a backend made of a step.

    Attributes:
        values: ``[num_tokens, num_heads, head_size_v], device``: what it returned, for the tokens that its chain keeps.
        refreshed: The same from metadata that was built for other tables and then refreshed; None if its builder
            declares no ``table_fields``.
        rows: ``[num_actual_tokens], int64, host``: which of the packed tokens these are, without padding.
        num_tokens: Tokens that it was given, padding included.
    """

    values: torch.Tensor
    refreshed: torch.Tensor | None
    rows: torch.Tensor
    num_tokens: int


def draw_inputs(case: Case, generator: torch.Generator) -> list[Inputs]:
    """Return each request's tensors, drawn at random; what the cache stores in fewer bits is rounded to them."""
    query = case.query

    def draw(*shape: int) -> torch.Tensor:
        return _SPREAD * torch.randn(*shape, generator=generator)

    inputs = []
    for request in case.requests:
        wanted = draw(request.num_new, query.num_heads, query.head_size).to(case.query_dtype)
        key, value = case.form.draw(case.spec, request.seq_len, lambda *shape: draw(*shape).to(case.stored_dtype))
        key, value = read_key, read_value = key.to(case.query_dtype), value.to(case.query_dtype)
        if case.spec.kv_format != PLAIN:
            # What was stored once is, stored again, far from the next code: a kernel that divides with another rounding
            # stores the same.
            key, value = (each.to(case.query_dtype) for each in round_trip(case.spec.kv_format, key, value))
            read_key, read_value = round_trip(case.spec.kv_format, key, value)
        inputs.append(Inputs(query=wanted, key=key, value=value, read_key=read_key, read_value=read_value))
    return inputs


def run_step(
    backend_class: type[AttentionBackend],
    case: Case,
    inputs: Sequence[Inputs],
    learned: Learned,
    device: torch.device,
    poison: float,
) -> Output:
    """Run a backend behind the case's chain, on requests in the order that its builder asks for.

    Args:
        backend_class: The backend.
        case: What to run.
        inputs: Each request's tensors.
        learned: The layer's learned tensors.
        device: Where.
        poison: What lies where no live state is.

    Raises:
        ConformanceError: The chain keeps other tokens than those that generate, or somebody wrote where nobody may.
        WrapperError: The chain refuses the layer or the step.
    """
    chain, seen, _ = bind_chain(case.wrappers, case.layer)
    owner, grouping, plan = _plan(case)
    storage = KVCacheStorage(plan, grouping, device)
    kv_cache = storage.views[case.layer.name]
    _fill(storage, case, poison)
    manager = KVCacheManager(plan, max_num_seqs=len(inputs) + 1, prefix_caching=False)
    _give_pages(manager, case)
    rows = [manager.row(str(index)) for index in range(len(inputs))]

    learned = learned.to(device)
    backend = _make_backend(backend_class, seen, device, learned.parameters)
    writer = backend
    if case.layer.shares_with is not None:
        writer = _make_backend(
            backend_class, attrs.evolve(seen, name=owner, shares_with=None), device, learned.parameters
        )
    for row, request, tensors in zip(rows, case.requests, inputs, strict=True):
        live = torch.tensor(_written_tokens(backend_class, case, request), dtype=torch.int64)
        block, offset = _slots(manager.tables[0], row, live)
        slots = block.to(device), offset.to(device)
        _write(writer, case, tensors.key[live], tensors.value[live], storage, slots)

    metadata = _make_metadata(case, manager, rows, device)

    def packed(part: Callable[[Inputs], torch.Tensor]) -> torch.Tensor:
        new = [part(each)[-request.num_new :] for request, each in zip(case.requests, inputs, strict=True)]
        padding = new[0].new_full((case.num_padding, *new[0].shape[1:]), poison)
        return torch.cat([*new, padding]).to(device)

    if not case.is_cross:
        slots = metadata.slot_mapping // metadata.block_size, metadata.slot_mapping % metadata.block_size
        _write(writer, case, packed(lambda each: each.key), packed(lambda each: each.value), storage, slots)
    guard = _WriteGuard([storage.pool, *_tensors(metadata)])
    wrapped = apply_chain(chain, metadata)
    guard.check("a wrapper wrote to the batch metadata")
    kept = _kept_rows(chain, metadata, wrapped)
    query = packed(lambda each: each.query).index_select(0, kept.to(device))
    builder = backend.make_builder()
    common, back = wrapped, None
    if builder.batch_order is not None and not is_ordered(builder.batch_order, wrapped):
        common, permutation = permute(wrapped, builder.batch_order)
        query, back = query.index_select(0, permutation.tokens), permutation.inverse
    guard = _WriteGuard([storage.pool, query, *_tensors(metadata), *_tensors(common)])

    def attend(built: Any) -> torch.Tensor:
        values = backend.forward(seen, query, kv_cache, built, learned.sinks)
        return values if back is None or len(values) != len(back) else values.index_select(0, back)

    built = _build(builder, common)
    values = attend(built)
    refreshed = None if builder.table_fields is None else attend(_build_and_refresh(builder, common))
    guard.check("it wrote to the cache, the query or the batch metadata")
    return Output(values=values, refreshed=refreshed, rows=kept[: wrapped.num_actual_tokens], num_tokens=len(kept))


def _fill(storage: KVCacheStorage, case: Case, poison: float) -> None:
    """Fill the pool with what a backend must not let through."""
    if case.spec.kv_format == PLAIN:
        storage.pool.view(case.stored_dtype).fill_(poison)
    else:
        # Any format's parts of a page: NaN as floats, and large codes; or finite floats of any length, and such codes.
        storage.pool.fill_(0xFF if math.isnan(poison) else 0x5E)


def _write(
    writer: AttentionBackend,
    case: Case,
    key: torch.Tensor,
    value: torch.Tensor,
    storage: KVCacheStorage,
    slots: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Let a backend store tokens, and look at the bytes that it must not touch."""
    kv_cache, before = storage.views[case.layer.name], storage.pool.clone()
    writer.write_kv(key.to(storage.pool.device), value.to(storage.pool.device), kv_cache, slots)
    changed = storage.pool != before
    for tensor in kv_cache.values():
        # The views are of the pool's bytes: the same places of what has changed are those that may.
        item, strides = tensor.element_size(), [stride * tensor.element_size() for stride in tensor.stride()]
        changed.as_strided((*tensor.shape, item), (*strides, 1), tensor.storage_offset() * item)[slots] = False
    if changed.any():
        raise ConformanceError(f"write_kv changes {int(changed.sum())} bytes beside its slots")


def _build(builder: AttentionMetadataBuilder, common: CommonAttentionMetadata) -> Any:
    """Return what a builder builds, brought to the device as the framework does."""
    here, there = _on_host(builder, common)
    (built,) = builder.build_together([(builder, here)])
    return there.to_device(built)


def _on_host(
    builder: AttentionMetadataBuilder, common: CommonAttentionMetadata
) -> tuple[CommonAttentionMetadata, Staging]:
    """Return metadata where a builder is given it, and what brings its outcome to where the metadata was."""
    if not builder.on_host:
        return common, Staging(HOST)
    return replace_tensors(common, lambda tensor: tensor.to(HOST)), Staging(common.slot_mapping.device)


def _build_and_refresh(builder: AttentionMetadataBuilder, common: CommonAttentionMetadata) -> Any:
    """Return what a builder builds for a group without a page, brought to this one's tables as the framework does."""
    without_pages = attrs.evolve(
        common,
        block_table=torch.zeros_like(common.block_table),
        slot_mapping=torch.zeros_like(common.slot_mapping),
    )
    here, there = _on_host(builder, common)
    built = builder.build(_on_host(builder, without_pages)[0])
    fields, declared = builder.refreshed_fields(built, here), builder.table_fields or frozenset()
    if set(fields) != declared:
        raise ConformanceError(f"its builder refreshes {sorted(fields)}, and declares {sorted(declared)}")
    return there.to_device(attrs.evolve(built, **fields))


def _make_backend(
    backend_class: type[AttentionBackend],
    layer: LayerSpec,
    device: torch.device,
    parameters: Mapping[str, torch.Tensor],
) -> AttentionBackend:
    options = backend_class.options_class
    given = None if options is None else options(**backend_class.conformance_options)
    backend = make_backend(backend_class, [layer], device, given, CopyScratch(device))
    if parameters:
        backend.bind(layer, parameters)
    return backend


def _kept_rows(
    chain: WrapperChain, metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata
) -> torch.Tensor:
    """Return which rows of the packed batch a chain keeps: all of them, or those that generate."""
    drops = any(DROPS_TOKENS in wrapper.effects for wrapper in chain) and not metadata.all_generate
    kept = metadata.generating_indices_cpu if drops else torch.arange(metadata.slot_mapping.shape[0])
    expected = metadata.num_generating if drops else metadata.num_actual_tokens, len(kept)
    found = wrapped.num_actual_tokens, wrapped.slot_mapping.shape[0]
    if found != expected:
        raise ConformanceError(
            f"the chain keeps {found[0]} tokens, {found[1]} with padding, of {metadata.num_actual_tokens}, of which "
            f"{metadata.num_generating} generate"
        )
    return kept


# --- the cache --------------------------------------------------------------------------------------------------------


def _plan(case: Case) -> tuple[str, Grouping, KVCachePlan]:
    """Plan a pool with room for the case twice over; the first item names the layer that keeps the cache."""
    layers = [case.layer]
    if case.layer.shares_with is not None:
        layers = [attrs.evolve(case.layer, name=case.layer.shares_with, shares_with=None), case.layer]
    # A neighbour in the same group takes a part of each page, so that the layer's own parts do not touch.
    grouping = group_layers([attrs.evolve(layers[0], name="neighbour"), *layers])
    longest = _longest(case)
    num_blocks = sum(-(-request.seq_len // case.spec.block_size) for request in case.requests)
    spare = 2 + -(-longest // case.spec.block_size)
    memory_bytes = grouping.groups[0].page_bytes * 2 * (num_blocks + spare)
    plan = plan_cache(grouping, memory_bytes=memory_bytes, max_model_len=longest, max_num_batched_tokens=longest)
    return layers[0].name, grouping, plan


def _give_pages(manager: KVCacheManager, case: Case) -> None:
    """Give each request its pages as an engine would: scattered over the pool, and without those that are dead."""
    # Requests grow by turns, block by block, beside one that leaves: nobody's pages follow one another, and the rows
    # of the block table are not in the batch's order.
    size, longest = case.spec.block_size, _longest(case)
    requests = {str(index): request for index, request in reversed([*enumerate(case.requests)])}
    for name in (*requests, "leaves"):
        manager.start(name, [0] * longest)
    for length in range(size, longest + size, size):
        for name, request in requests.items():
            _extend(manager, name, min(length, request.num_cached))
        _extend(manager, "leaves", min(length, longest))
    manager.free("leaves")
    for name, request in requests.items():
        manager.commit(name, [0] * longest, request.num_cached)
        _extend(manager, name, request.seq_len)


def _longest(case: Case) -> int:
    """Return the most tokens of a sequence, of queries or of keys."""
    return max(max(request.seq_len, request.num_new) for request in case.requests)


def _extend(manager: KVCacheManager, name: str, num_tokens: int) -> None:
    has_room = manager.extend(name, num_tokens)
    assert has_room


def _written_tokens(backend_class: type[AttentionBackend], case: Case, request: Request) -> list[int]:
    """Return which cached tokens are there: live ones, and others in their pages where a backend reads those too."""
    spec, end = case.spec, request.num_cached
    ranges = spec.live_ranges(end)
    if backend_class.capabilities.reads_dead_tokens:
        size = spec.block_size
        ranges = tuple((start * size, min(stop * size, end)) for start, stop in spec.live_blocks(end))
    return [token for start, stop in ranges for token in range(max(start, request.num_hidden), stop)]


def _slots(table: BlockTable, row: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(table.ids[row])[tokens // table.block_size].long(), tokens % table.block_size


class _WriteGuard:
    """Tensors that nobody may write to, with a copy of each."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._copies = [tensor.clone() for tensor in tensors]

    def check(self, message: str) -> None:
        # As bytes: NaN is then the same as itself.
        pairs = zip(self._tensors, self._copies, strict=True)
        if not all(torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8)) for tensor, copy in pairs):
            raise ConformanceError(message)


# --- the batch metadata -----------------------------------------------------------------------------------------------


def _make_metadata(
    case: Case, manager: KVCacheManager, rows: Sequence[int], device: torch.device
) -> CommonAttentionMetadata:
    ends = np.cumsum([request.num_new for request in case.requests])
    generating = [
        np.arange(end - request.num_generating, end) for request, end in zip(case.requests, ends, strict=True)
    ]
    hidden = torch.tensor([request.num_hidden for request in case.requests], dtype=torch.int32)
    extensions = {SEQ_STARTS: Extension(hidden.to(device), Axis.REQUEST, hidden)} if hidden.any() else NO_EXTENSIONS
    batch = StepBatch(
        rows=np.array(rows),
        num_computed=np.array([request.num_computed for request in case.requests]),
        query_lens=np.array([request.num_new for request in case.requests]),
        generating_indices=np.concatenate(generating),
        extensions=extensions,
    )
    (metadata,) = build_metadata(batch, manager.tables, device)
    metadata = attrs.evolve(metadata, causal=case.causal)
    if case.is_cross:
        metadata = _over_other_keys(metadata, case, manager.tables[0].ids[rows])
    if not case.num_padding:
        return metadata
    return pad_metadata(
        metadata,
        num_reqs=metadata.num_reqs + case.num_padding,
        num_tokens=metadata.num_actual_tokens + case.num_padding,
        num_generating=len(metadata.generating_indices) + case.num_padding,
        # A graph that is not of decodes alone is made for longer requests than any in the batch.
        max_query_len=metadata.max_query_len + (metadata.max_query_len > 1),
        max_seq_len=metadata.max_seq_len + metadata.block_size,
    )


def _over_other_keys(
    metadata: CommonAttentionMetadata, case: Case, tables: npt.NDArray[np.int32]
) -> CommonAttentionMetadata:
    """Return the metadata of the same queries over sequences of which nothing is computed in the step."""
    seq_lens = torch.tensor([request.seq_len for request in case.requests], dtype=torch.int32)
    longest = int(seq_lens.max())
    device = metadata.seq_lens.device
    return attrs.evolve(
        metadata,
        seq_lens=seq_lens.to(device),
        seq_lens_cpu=seq_lens,
        max_seq_len=longest,
        block_table=torch.from_numpy(tables[:, : -(-longest // metadata.block_size)]).to(device),
        slot_mapping=torch.zeros_like(metadata.slot_mapping),
    )


def _tensors(metadata: CommonAttentionMetadata) -> list[torch.Tensor]:
    values = [*attrs.asdict(metadata, recurse=False).values()]
    for extension in metadata.extensions.values():
        values += [extension.values, extension.values_cpu]
    return [value for value in values if isinstance(value, torch.Tensor)]
