"""Run a backend on one case, in a real paged cache, and hold it against the reference.

The pool is NaN wherever the contract does not let a backend look: other layers' parts of a page, tokens that are no
longer live, the null page, free pages, the ends of blocks. One read of those shows in the output.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import torch

from kvframe.attention.backend import AttentionBackend
from kvframe.attention.metadata import CommonAttentionMetadata
from kvframe.attention.step import StepBatch, build_metadata
from kvframe.cache.block_table import BlockTable
from kvframe.cache.manager import KVCacheManager
from kvframe.cache.storage import KVCacheStorage
from kvframe.groups import Grouping, group_layers
from kvframe.plan import KVCachePlan, plan_cache
from kvframe.testing.grid import Case
from kvframe.testing.laws import ConformanceError
from kvframe.testing.reference import dense_attention, visible_tokens

ERROR_FACTOR = 2
"""A backend may err by this factor more than the reference does in the same dtype."""

ROUNDING_UNITS = 4
"""And by as many rounding units of the largest output, for where the reference happens to err by nothing."""

_SPREAD = 1.5
_LOWER_DTYPE = {torch.float64: torch.float32}


@attrs.frozen(kw_only=True, eq=False)
class Inputs:
    """One request's tensors on the host, in the dtype that a model computes in.

    Attributes:
        query: ``[num_new, num_heads, head_size]``.
        key: ``[seq_len, num_kv_heads, head_size]``.
        value: ``[seq_len, num_kv_heads, head_size_v]``.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def check_backend(
    backend_class: type[AttentionBackend], case: Case, device: str = "cpu", poison: float = float("nan")
) -> None:
    """Check that a backend computes a case within the error that its dtype allows, and writes nowhere it may not.

    Args:
        backend_class: The backend.
        case: One that its capabilities cover (``make_cases``).
        device: Where it runs.
        poison: What lies where no live state is; a large finite value finds a backend that hides NaN.

    Raises:
        ConformanceError: It does not; says at which request and position, and by how much.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    inputs = [_draw(case, request.num_new, request.seq_len, generator) for request in case.requests]
    sinks = None
    if case.query.has_sinks:
        sinks = torch.randn(case.query.num_heads, generator=generator).to(case.query_dtype)
    output = _run_step(backend_class, case, inputs, sinks, torch.device(device), poison)
    num_tokens = sum(request.num_new for request in case.requests) + case.num_padding
    expected = (num_tokens, case.query.num_heads, case.spec.head_size_v), case.query_dtype
    if (tuple(output.shape), output.dtype) != expected:
        raise _failure(backend_class, case, f"the output is {tuple(output.shape)}, {output.dtype}, not {expected}")
    _check_errors(backend_class, case, inputs, sinks, output.cpu())


def _draw(case: Case, num_new: int, seq_len: int, generator: torch.Generator) -> Inputs:
    spec, query = case.spec, case.query
    stored: torch.dtype = getattr(torch, spec.dtype)

    def draw(*shape: int) -> torch.Tensor:
        return _SPREAD * torch.randn(*shape, generator=generator)

    return Inputs(
        query=draw(num_new, query.num_heads, query.head_size).to(case.query_dtype),
        key=draw(seq_len, spec.num_kv_heads, spec.head_size).to(stored).to(case.query_dtype),
        value=draw(seq_len, spec.num_kv_heads, spec.head_size_v).to(stored).to(case.query_dtype),
    )


# --- the step ---------------------------------------------------------------------------------------------------------


def _run_step(
    backend_class: type[AttentionBackend],
    case: Case,
    inputs: Sequence[Inputs],
    sinks: torch.Tensor | None,
    device: torch.device,
    poison: float,
) -> torch.Tensor:
    grouping, plan = _plan(case)
    storage = KVCacheStorage(plan, grouping, device)
    kv_cache = storage.views[case.layer.name]
    storage.pool.view(kv_cache["k"].dtype).fill_(poison)
    manager = KVCacheManager(plan, max_num_seqs=len(inputs) + 1, prefix_caching=False)
    _give_pages(manager, case)
    rows = [manager.row(str(index)) for index in range(len(inputs))]

    backend = backend_class([case.layer], device)
    for row, request, tensors in zip(rows, case.requests, inputs, strict=True):
        ranges = case.spec.live_ranges(request.num_computed)
        live = torch.tensor([token for start, stop in ranges for token in range(start, stop)], dtype=torch.int64)
        slots = tuple(part.to(device) for part in _slots(manager.tables[0], row, live))
        backend.write_kv(tensors.key[live].to(device), tensors.value[live].to(device), kv_cache, (slots[0], slots[1]))

    metadata = _make_metadata(case, manager, rows, device)
    slots = metadata.slot_mapping // metadata.block_size, metadata.slot_mapping % metadata.block_size

    def packed(part: Callable[[Inputs], torch.Tensor]) -> torch.Tensor:
        new = [part(each)[-request.num_new :] for request, each in zip(case.requests, inputs, strict=True)]
        padding = new[0].new_full((case.num_padding, *new[0].shape[1:]), poison)
        return torch.cat([*new, padding]).to(device)

    query = packed(lambda each: each.query)
    backend.write_kv(packed(lambda each: each.key), packed(lambda each: each.value), kv_cache, slots)
    read_only = [storage.pool, query, *_tensors(metadata)]
    before = [tensor.clone() for tensor in read_only]
    built = backend.make_builder().build(metadata)
    output = backend.forward(case.layer, query, kv_cache, built, None if sinks is None else sinks.to(device))
    if not all(_same_bytes(tensor, copy) for tensor, copy in zip(read_only, before, strict=True)):
        raise _failure(backend_class, case, "it wrote to the cache, the query or the batch metadata")
    return output


def _plan(case: Case) -> tuple[Grouping, KVCachePlan]:
    """Plan a pool with room for the case twice over."""
    # A neighbour in the same group takes a part of each page, so that the layer's own parts do not touch.
    grouping = group_layers([attrs.evolve(case.layer, name="neighbour"), case.layer])
    longest = max(request.seq_len for request in case.requests)
    num_blocks = sum(-(-request.seq_len // case.spec.block_size) for request in case.requests)
    spare = 2 + -(-longest // case.spec.block_size)
    memory_bytes = grouping.groups[0].page_bytes * 2 * (num_blocks + spare)
    return grouping, plan_cache(
        grouping, memory_bytes=memory_bytes, max_model_len=longest, max_num_batched_tokens=longest
    )


def _give_pages(manager: KVCacheManager, case: Case) -> None:
    """Give each request its pages as an engine would: scattered over the pool, and without those that are dead."""
    # Requests grow by turns, block by block, beside one that leaves: nobody's pages follow one another, and the rows
    # of the block table are not in the batch's order.
    size, longest = case.spec.block_size, max(request.seq_len for request in case.requests)
    requests = {str(index): request for index, request in reversed([*enumerate(case.requests)])}
    for name in (*requests, "leaves"):
        manager.start(name, [0] * longest)
    for length in range(size, longest + size, size):
        for name, request in requests.items():
            _extend(manager, name, min(length, request.num_computed))
        _extend(manager, "leaves", min(length, longest))
    manager.free("leaves")
    for name, request in requests.items():
        manager.commit(name, [0] * longest, request.num_computed)
        _extend(manager, name, request.seq_len)


def _extend(manager: KVCacheManager, name: str, num_tokens: int) -> None:
    has_room = manager.extend(name, num_tokens)
    assert has_room


def _slots(table: BlockTable, row: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(table.ids[row])[tokens // table.block_size].long(), tokens % table.block_size


def _make_metadata(
    case: Case, manager: KVCacheManager, rows: Sequence[int], device: torch.device
) -> CommonAttentionMetadata:
    batch = StepBatch(
        rows=np.array(rows),
        num_computed=np.array([request.num_computed for request in case.requests]),
        query_lens=np.array([request.num_new for request in case.requests]),
        generating_indices=np.array([0]),
    )
    (metadata,) = build_metadata(batch, manager.tables, device)
    end = torch.full((case.num_padding,), metadata.num_actual_tokens, dtype=torch.int32)
    none = torch.zeros(case.num_padding, dtype=torch.int32)
    table, slot_mapping = metadata.block_table, metadata.slot_mapping
    return attrs.evolve(
        metadata,
        query_start_loc=torch.cat([metadata.query_start_loc, end.to(device)]),
        query_start_loc_cpu=torch.cat([metadata.query_start_loc_cpu, end]),
        seq_lens=torch.cat([metadata.seq_lens, none.to(device)]),
        seq_lens_cpu=torch.cat([metadata.seq_lens_cpu, none]),
        num_reqs=metadata.num_reqs + case.num_padding,
        block_table=torch.cat([table, table.new_zeros(case.num_padding, table.shape[1])]),
        slot_mapping=torch.cat([slot_mapping, slot_mapping.new_zeros(case.num_padding)]),
        causal=case.causal,
    )


def _tensors(metadata: CommonAttentionMetadata) -> list[torch.Tensor]:
    values = attrs.asdict(metadata, recurse=False).values()
    return [value for value in values if isinstance(value, torch.Tensor)]


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are the same, NaN being the same as itself."""
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


# --- the verdict ------------------------------------------------------------------------------------------------------


def _check_errors(
    backend_class: type[AttentionBackend],
    case: Case,
    inputs: Sequence[Inputs],
    sinks: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    dtype = _LOWER_DTYPE.get(case.query_dtype, case.query_dtype)
    exact = torch.cat([*_reference(case, inputs, sinks, torch.float64)])
    rounded = torch.cat([*_reference(case, inputs, sinks, dtype)])
    unit = torch.finfo(case.query_dtype).eps
    # Nothing is more exact than float64 to measure its error by: it errs by as many of its units as float32 does.
    own_error = float((rounded - exact).abs().max()) * unit / torch.finfo(dtype).eps
    allowed = ERROR_FACTOR * own_error + ROUNDING_UNITS * unit * float(exact.abs().max())
    errors = (output[: exact.shape[0]].double() - exact).abs().flatten(1).amax(1)
    # NaN is never within, as it compares false with everything.
    wrong = (~(errors <= allowed)).nonzero().flatten().tolist()
    if wrong:
        index, position = [*_places(case)][wrong[0]]
        hint = "; NaN is state that is not live" if bool(errors[wrong].isnan().any()) else ""
        raise _failure(
            backend_class,
            case,
            f"{len(wrong)} of {len(errors)} queries are wrong, the first at position {position} of request {index} "
            f"({case.requests[index]}), by {float(errors[wrong[0]]):.3g} where {allowed:.3g} is allowed{hint}",
        )


def _reference(
    case: Case, inputs: Sequence[Inputs], sinks: torch.Tensor | None, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Yield each request's output, computed in ``dtype``, as float64."""
    mask = case.spec.mask
    causal = case.causal and (mask is None or mask.causal)
    for request, tensors in zip(case.requests, inputs, strict=True):
        visible = visible_tokens(case.spec, request.num_computed, request.seq_len, causal)
        query, key, value = (each.to(dtype) for each in (tensors.query, tensors.key, tensors.value))
        yield dense_attention(
            case.query, query, key, value, visible, None if sinks is None else sinks.to(dtype)
        ).double()


def _places(case: Case) -> Iterator[tuple[int, int]]:
    """Yield the request and the position of each packed query."""
    for index, request in enumerate(case.requests):
        for position in range(request.num_computed, request.seq_len):
            yield index, position


def _failure(backend_class: type[AttentionBackend], case: Case, message: str) -> ConformanceError:
    return ConformanceError(f"{backend_class.__name__} on {case.name}: {message}")
