"""Runs a case's step in a paged cache that holds NaN in all memory that a backend must not read.

That is: other layers' parts of a page, tokens that are not live, the null page, free pages, the ends of blocks. A read
of such memory shows in the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from kvframe.attention.copies import CopyScratch, make_backend
from kvframe.attention.layer import AttentionLayer
from kvframe.attention.nested import replace_tensors
from kvframe.attention.request_order import is_ordered, permute
from kvframe.attention.staging import HOST, Staging
from kvframe.attention.wrapping import apply_chain
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder, KVCache, MoreInputs
from kvframe.contract.choice import ChosenTokens
from kvframe.contract.errors import BackendError
from kvframe.contract.foreign import safe_repr
from kvframe.contract.merging import lse_dtype
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.slots import Slots
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import DROPS_TOKENS
from kvframe.loading.claims import find_misdeclared
from kvframe.selection.chains import WrapperChain, bind_chain
from kvframe.testing.case import Case, Inputs, Learned
from kvframe.testing.hosts import KVFRAME, Host
from kvframe.testing.laws import ConformanceError
from kvframe.testing.metadata import make_metadata_of_groups
from kvframe.testing.pages import fill, give_pages, plan_pool, slots_of, write, written_tokens

BUILT = ""
"""Metadata that was built for the step."""
REFRESHED = "with refreshed metadata, "
"""Metadata that was built for other tables and then refreshed."""
WITH_LSE = "with the log-sum-exp, "
"""Metadata that was built for the step, and memory for the log-sum-exp."""
WITHOUT_SINKS = "with the log-sum-exp and without the layer's sinks, "
"""Likewise, for a part of the keys to which the sinks do not belong. All of these begin error sentences."""

Attended = tuple[torch.Tensor, torch.Tensor | None]
"""``[num_tokens, num_heads, head_size_v], device``; and the log-sum-exp, ``[num_tokens, num_heads]``, or None."""


@attrs.frozen(kw_only=True, eq=False)
class Output:
    """A backend's output in a step.

    Attributes:
        results: For the tokens that the chain keeps: of ``attend`` with metadata that is ``BUILT``, and ``REFRESHED``
            if its builder declares ``table_fields``; ``WITH_LSE`` if the backend returns the log-sum-exp, and
            ``WITHOUT_SINKS`` if the layer has learned sinks too.
        rows: ``[num_actual_tokens], int64, host``: the packed tokens that the chain keeps, without padding.
    """

    results: Mapping[str, Attended]
    rows: torch.Tensor


def run_step(
    backend_class: type[AttentionBackend],
    case: Case,
    inputs: Sequence[Inputs],
    learned: Learned,
    device: torch.device,
    poison: float,
    host: Host = KVFRAME,
) -> Output:
    """Run a backend after the case's chain, on requests in the order that its builder asks for.

    Raises ``WrapperError`` if the chain refuses the layer or the step.
    """
    chain, seen, _ = bind_chain(case.wrappers, case.layer)
    owner, grouping, plan = plan_pool(case)
    manager = KVCacheManager(plan, max_num_seqs=len(inputs) + 1, prefix_caching=False)
    give_pages(manager, case)
    storage = host.begin(case, plan, grouping, manager, device)
    kv_cache = storage.views[case.layer.name]
    fill(storage, case, poison)
    rows = [manager.row(str(index)) for index in range(len(inputs))]

    learned = learned.to(device)
    learned_guard = WriteGuard(learned.tensors)
    backend = writer = _make_backend(backend_class, seen, device, learned.parameters)
    if case.layer.shares_with is not None:
        layer = attrs.evolve(seen, name=owner, shares_with=None)
        writer = _make_backend(backend_class, layer, device, learned.parameters)
    live = [torch.tensor(written_tokens(backend_class, case, request), dtype=torch.int64) for request in case.requests]
    table = manager.tables[0]
    flat = torch.cat([slots_of(table, row, tokens) for row, tokens in zip(rows, live, strict=True)])
    key = torch.cat([request.key[tokens] for request, tokens in zip(inputs, live, strict=True)])
    value = torch.cat([request.value[tokens] for request, tokens in zip(inputs, live, strict=True)])
    write(writer, case, host.rows(key), host.rows(value), storage, host.slots(flat.to(device), table.block_size))

    builder = backend.make_builder()
    if misdeclared := find_misdeclared(AttentionMetadataBuilder, builder):
        raise ConformanceError(f"make_builder() returned {safe_repr(builder)}, which {misdeclared}")
    exact = builder.needs_exact_lens or bool(len(chain))
    metadata = host.metadata(make_metadata_of_groups(case, manager, rows, device)[0], exact=exact)
    query, key, value = pack(case, inputs, poison, device)
    if not case.is_cross:
        for turn in _turns(len(key), host):
            # A token that is skipped must not reach a page.
            shown = turn.to(device)[:, None, None]
            slots = Slots(metadata.slot_mapping.masked_fill(~shown.view(-1), -1), metadata.block_size)
            stored_key, stored_value = (host.rows(tensor.masked_fill(~shown, 1)) for tensor in (key, value))
            write(writer, case, stored_key, stored_value, storage, slots)
    guard = WriteGuard([storage.pool, *tensors_of(metadata)])
    wrapped = apply_chain(chain, metadata)
    guard.check("a wrapper wrote to the batch metadata")
    kept_rows = _kept_rows(chain, metadata, wrapped)
    query = query.index_select(0, kept_rows.to(device))
    more = None if case.query.choice is None else MoreInputs(chosen=_choices(case, device))
    common, back = wrapped, None
    if builder.batch_order is not None and not is_ordered(builder.batch_order, wrapped):
        common, permutation = permute(wrapped, builder.batch_order)
        query, back = query.index_select(0, permutation.tokens), permutation.inverse
        if more is not None and more.chosen is not None:
            more = MoreInputs(chosen=more.chosen.rows(lambda rows: rows.index_select(0, permutation.tokens)))
    query = host.rows(query)
    guard = WriteGuard([storage.pool, query, *tensors_of(metadata), *tensors_of(common)])
    results: dict[str, Attended] = {}

    def attend(how: str, built: Any, sinks: torch.Tensor | None, *, with_lse: bool) -> None:
        lse = empty_lse(query) if with_lse else None
        out = host.make_output((len(query), case.query.num_heads, case.form.head_size_v(case.spec)), query)
        try:
            returned = backend.attend(seen, query, kv_cache, built, sinks=sinks, out=out, lse=lse, more=more)
            output = check_output(returned, case, query)
            host.take_output(output)
        except (BackendError, ConformanceError) as error:
            raise ConformanceError(f"{how}{error}") from error
        if back is not None:
            output, lse = output.index_select(0, back), None if lse is None else lse.index_select(0, back)
        results[how] = output, lse

    lent, take_back = host.lend(common)
    built = _build(builder, lent)
    take_back()
    attend(BUILT, built, learned.sinks, with_lse=False)
    if backend_class.capabilities.returns_lse:
        attend(WITH_LSE, built, learned.sinks, with_lse=True)
        if learned.sinks is not None:
            attend(WITHOUT_SINKS, built, None, with_lse=True)
    if builder.table_fields is not None:
        attend(REFRESHED, _build_and_refresh(builder, common), learned.sinks, with_lse=False)
    guard.check("it wrote to the cache, the query or the batch metadata")
    learned_guard.check("it wrote to the learned tensors")
    return Output(results=results, rows=kept_rows[: wrapped.num_actual_tokens])


def pack(
    case: Case, inputs: Sequence[Inputs], poison: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the queries, keys and values of a step's new tokens, with poison as padding after them."""

    def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        new = [tensor[-request.num_new :] for request, tensor in zip(case.requests, tensors, strict=True)]
        padding = new[0].new_full((case.num_padding, *new[0].shape[1:]), poison)
        return torch.cat([*new, padding]).to(device)

    query, key, value = zip(*((request.query, request.key, request.value) for request in inputs), strict=True)
    return packed(query), packed(key), packed(value)


def _choices(case: Case, device: torch.device) -> ChosenTokens:
    """Return what the step's queries read, those of padding too."""
    assert case.query.choice is not None
    rows = torch.cat([case.chosen(index) for index in range(len(case.requests))])
    padding = rows.new_zeros(case.num_padding, *rows.shape[1:])
    return ChosenTokens(torch.cat([rows, padding]).to(device), case.query.choice.block_size)


def _turns(num_tokens: int, host: Host) -> Iterator[torch.Tensor]:
    """Yield which tokens are stored at a time, ``[num_tokens], bool, host``."""
    if not host.skips_slots:
        yield torch.ones(num_tokens, dtype=torch.bool)
        return
    for turn in range(2):
        yield torch.arange(num_tokens) % 2 != turn


def _build(builder: AttentionMetadataBuilder, common: CommonAttentionMetadata) -> Any:
    """Return a builder's metadata, copied to the device as the framework does it."""
    here, there = _on_host(builder, common)
    (built,) = builder.build_together([(builder, here)])
    return builder.finish(there.to_device(built))


def _on_host(
    builder: AttentionMetadataBuilder, common: CommonAttentionMetadata
) -> tuple[CommonAttentionMetadata, Staging]:
    """Return the metadata as a builder gets them, and a function that moves its result to the original device."""
    if builder.on_host is None:
        return common, Staging(HOST)
    return replace_tensors(common, lambda tensor: tensor.to(HOST)), Staging(common.slot_mapping.device)


def _build_and_refresh(builder: AttentionMetadataBuilder, common: CommonAttentionMetadata) -> Any:
    """Return metadata that were built for an empty table, then refreshed for this one as the framework does it."""
    empty: Any = {name: torch.zeros_like(getattr(common, name)) for name in ("block_table", "slot_mapping")}
    here, there = _on_host(builder, common)
    built = builder.build(_on_host(builder, attrs.evolve(common, **empty))[0])
    fields, declared = builder.refreshed_fields(built, here), builder.table_fields or frozenset()
    if set(fields) != declared:
        raise ConformanceError(f"its builder refreshes {sorted(fields)}, and declares {sorted(declared)}")
    built, fields = there.to_device((built, fields))
    return attrs.evolve(builder.finish(built), **fields)


def _make_backend(
    backend_class: type[AttentionBackend],
    layer: LayerSpec,
    device: torch.device,
    parameters: Mapping[str, torch.Tensor],
) -> AttentionBackend:
    backend = make_backend(backend_class, [layer], device, conformance_options(backend_class), CopyScratch(device))
    if parameters:
        backend.bind(layer, parameters)
    return backend


def conformance_options(backend_class: type[AttentionBackend]) -> Any:
    """Return the options with which the kit makes a backend; None if it has none."""
    options = backend_class.options_class
    return None if options is None else options(**backend_class.conformance_options)


def _kept_rows(
    chain: WrapperChain, metadata: CommonAttentionMetadata, wrapped: CommonAttentionMetadata
) -> torch.Tensor:
    """Return the rows of the packed batch that a chain keeps: all of them, or those that generate."""
    rows, num_rows = torch.arange(metadata.slot_mapping.shape[0]), metadata.num_actual_tokens
    generating = metadata.generating_indices_cpu
    if any(DROPS_TOKENS in wrapper.effects for wrapper in chain) and not metadata.all_generate:
        rows, num_rows = (rows, num_rows) if generating is None else (generating, metadata.num_generating)
    num_wrapped, num_padded = wrapped.num_actual_tokens, wrapped.slot_mapping.shape[0]
    if (num_wrapped, num_padded) != (num_rows, len(rows)):
        raise ConformanceError(
            f"the chain keeps {num_wrapped} tokens, {num_padded} with padding, of {metadata.num_actual_tokens}, of "
            f"which {metadata.num_generating} generate"
        )
    return rows


class WriteGuard:
    """Tensors that must not be written to, with a copy of each."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._copies = [tensor.clone() for tensor in tensors]

    def holds(self) -> bool:
        """Return whether they are unchanged."""
        # Compared as bytes, because NaN is not equal to itself.
        pairs = zip(self._tensors, self._copies, strict=True)
        return all(same_bits(tensor, copy) for tensor, copy in pairs)

    def check(self, message: str) -> None:
        """Raise a ``ConformanceError`` with the message if one of them was written to."""
        if not self.holds():
            raise ConformanceError(message)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bits."""
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def tensors_of(metadata: CommonAttentionMetadata) -> list[torch.Tensor]:
    """Return every tensor of a step's metadata, including host tensors and those of extensions."""
    values = [*attrs.asdict(metadata, recurse=False).values()]
    for extension in metadata.extensions.values():
        values += [extension.values, extension.values_cpu]
    return [value for value in values if isinstance(value, torch.Tensor)]


# --- what a backend returns -------------------------------------------------------------------------------------------


def check_output(values: object, case: Case, query: torch.Tensor) -> torch.Tensor:
    """Return the result of ``attend`` for these queries: a dense ``torch.Tensor`` of their shape, dtype and device."""
    shape = len(query), case.query.num_heads, case.form.head_size_v(case.spec)
    # A subclass is refused, because it could misreport its own values and comparisons.
    if type(values) is not torch.Tensor:
        raise ConformanceError(f"attend returns {type(values).__name__}, not torch.Tensor")
    expected = _say(shape, query.dtype, query.device, torch.strided)
    actual = _say(tuple(values.shape), values.dtype, values.device, values.layout)
    if actual != expected:
        raise ConformanceError(f"the output is {actual}, not {expected}")
    return values


def empty_lse(query: torch.Tensor) -> torch.Tensor:
    """Return memory for the log-sum-exp of queries, which holds NaN until a backend writes there."""
    return query.new_full(query.shape[:2], float("nan"), dtype=lse_dtype(query.dtype))


def attend_with_lse(
    layer: AttentionLayer, kv_cache: KVCache, query: torch.Tensor, sinks: torch.Tensor | None, case: Case
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp of a layer without wrappers, in the step that its group has begun."""
    lse = empty_lse(query)
    output = layer.attend(query, kv_cache, layer.step.read, sinks, lse=lse)
    return check_output(output, case, query), lse


def _say(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: torch.layout) -> str:
    where = "" if layout is torch.strided else f", {layout}"
    return f"{shape}, {dtype}, {device}{where}"
