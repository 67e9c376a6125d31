"""Runs a case's step in a paged cache that holds NaN in all memory that a backend must not read.

That is: other layers' parts of a page, tokens that are not live, the null page, free pages, the ends of blocks. A read
of such memory shows in the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import attrs
import torch

from kvframe.attention.copies import CopyScratch, make_backend
from kvframe.attention.key_parts import merged_over
from kvframe.attention.nested import replace_tensors
from kvframe.attention.request_order import is_ordered, permute
from kvframe.attention.staging import HOST, Staging
from kvframe.attention.wrapping import apply_chain
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder, MoreInputs
from kvframe.contract.choice import ChosenTokens
from kvframe.contract.errors import BackendError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.slots import Slots
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import DROPS_TOKENS
from kvframe.loading.declarations import find_misdeclared
from kvframe.selection.chains import WrapperChain, bind_chain
from kvframe.testing.case import Case
from kvframe.testing.hosts import KVFRAME, Host
from kvframe.testing.inputs import Inputs, Learned
from kvframe.testing.laws import ConformanceError
from kvframe.testing.output import check_output, check_outputs
from kvframe.testing.pages import fill, give_pages, plan_pool, slots_of, write, written_tokens
from kvframe.testing.step_metadata import make_step_metadata

BUILT = ""
"""Metadata that was built for the step."""
REFRESHED = "with refreshed metadata, "
"""Metadata that was built for other tables and then refreshed."""
WITH_LSE = "from forward_with_lse, "
"""Metadata that was built for the step, and ``forward_with_lse`` instead of ``forward``."""
WITHOUT_SINKS = "from forward_with_lse without the layer's sinks, "
"""Likewise, for a part of the keys to which the sinks do not belong. All of these begin error sentences."""


@attrs.frozen(kw_only=True, eq=False)
class Output:
    """A backend's output in a step.

    Attributes:
        values: ``[num_tokens, num_heads, head_size_v], device``: what ``forward`` returned for the tokens that the
            chain keeps, by how its metadata was made: ``BUILT`` always, ``REFRESHED`` if its builder declares
            ``table_fields``.
        with_lse: What ``forward_with_lse`` returned, the same and ``[num_tokens, num_heads], device``: ``WITH_LSE`` if
            the backend returns the log-sum-exp, and ``WITHOUT_SINKS`` if the layer has learned sinks too.
        rows: ``[num_actual_tokens], int64, host``: the packed tokens that the chain keeps, without padding.
    """

    values: Mapping[str, torch.Tensor]
    with_lse: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
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

    Args:
        backend_class: The backend.
        case: The case.
        inputs: Each request's tensors.
        learned: The layer's learned tensors.
        device: The device of the backend.
        poison: The value of all memory without live state.
        host: Whose memory and step the backend is given.

    Raises:
        ConformanceError: The chain keeps other tokens than the generating ones, the output breaks the contract, or
            other memory was written.
        WrapperError: The chain refuses the layer or the step.
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
    backend = _make_backend(backend_class, seen, device, learned.parameters)
    writer = backend
    backend = merged_over(backend, chain, [seen], device)
    if case.layer.shares_with is not None:
        writer = _make_backend(
            backend_class, attrs.evolve(seen, name=owner, shares_with=None), device, learned.parameters
        )
    live = [torch.tensor(written_tokens(backend_class, case, request), dtype=torch.int64) for request in case.requests]
    table = manager.tables[0]
    flat = torch.cat([slots_of(table, row, tokens) for row, tokens in zip(rows, live, strict=True)])
    key, value = (
        torch.cat([part(each)[tokens] for each, tokens in zip(inputs, live, strict=True)])
        for part in (attrgetter("key"), attrgetter("value"))
    )
    write(writer, case, host.rows(key), host.rows(value), storage, host.slots(flat.to(device), table.block_size))

    builder = backend.make_builder()
    if misdeclared := find_misdeclared(AttentionMetadataBuilder, builder):
        raise ConformanceError(f"make_builder() returns what {misdeclared}")
    exact = builder.needs_exact_lens or bool(len(chain))
    metadata = host.metadata(make_step_metadata(case, manager, rows, device), exact=exact)

    def packed(part: Callable[[Inputs], torch.Tensor]) -> torch.Tensor:
        new = [part(each)[-request.num_new :] for request, each in zip(case.requests, inputs, strict=True)]
        padding = new[0].new_full((case.num_padding, *new[0].shape[1:]), poison)
        return torch.cat([*new, padding]).to(device)

    if not case.is_cross:
        key, value = packed(lambda each: each.key), packed(lambda each: each.value)
        for turn in _turns(len(key), host):
            # A token that is skipped must not reach a page.
            shown = turn.to(device)[:, None, None]
            slots = Slots(metadata.slot_mapping.masked_fill(~shown.view(-1), -1), metadata.block_size)
            stored_key, stored_value = (host.rows(each.masked_fill(~shown, 1)) for each in (key, value))
            write(writer, case, stored_key, stored_value, storage, slots)
    guard = WriteGuard([storage.pool, *tensors_of(metadata)])
    wrapped = apply_chain(chain, metadata)
    guard.check("a wrapper wrote to the batch metadata")
    kept = _kept_rows(chain, metadata, wrapped)
    query = packed(lambda each: each.query).index_select(0, kept.to(device))
    more = None if case.query.choice is None else MoreInputs(chosen=_choices(case, device))
    common, back = wrapped, None
    if builder.batch_order is not None and not is_ordered(builder.batch_order, wrapped):
        common, permutation = permute(wrapped, builder.batch_order)
        query, back = query.index_select(0, permutation.tokens), permutation.inverse
        if more is not None and more.chosen is not None:
            more = MoreInputs(chosen=more.chosen.rows(lambda rows: rows.index_select(0, permutation.tokens)))
    query = host.rows(query)
    guard = WriteGuard([storage.pool, query, *tensors_of(metadata), *tensors_of(common)])

    def back_in_order(values: torch.Tensor) -> torch.Tensor:
        return values if back is None else values.index_select(0, back)

    def attend(built: Any, made: str) -> torch.Tensor:
        out = host.make_output((len(query), case.query.num_heads, case.form.head_size_v(case.spec)), query)
        try:
            if more is not None:
                values = backend.forward_more(seen, query, kv_cache, built, learned.sinks, more)[0]
                return back_in_order(check_output(values, case, query))
            values = check_output(backend.forward(seen, query, kv_cache, built, learned.sinks, out), case, query)
            host.take_output(values)
        except ConformanceError as error:
            raise ConformanceError(f"{made}{error}") from error
        return back_in_order(values)

    def attend_with_lse(built: Any, made: str, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            pair = (
                backend.forward_with_lse(seen, query, kv_cache, built, sinks)
                if more is None
                else backend.forward_more(seen, query, kv_cache, built, sinks, more)
            )
            output, lse = check_outputs(pair, case, query)
        except (ConformanceError, BackendError) as error:
            raise ConformanceError(f"{made}{error}") from error
        return back_in_order(output), back_in_order(lse)

    lent, take_back = host.lend(common)
    built = _build(builder, lent)
    take_back()
    values, with_lse = {BUILT: attend(built, BUILT)}, {}
    if backend_class.capabilities.returns_lse:
        with_lse[WITH_LSE] = attend_with_lse(built, WITH_LSE, learned.sinks)
        if learned.sinks is not None:
            with_lse[WITHOUT_SINKS] = attend_with_lse(built, WITHOUT_SINKS, None)
    if builder.table_fields is not None:
        values[REFRESHED] = attend(_build_and_refresh(builder, common), REFRESHED)
    guard.check("it wrote to the cache, the query or the batch metadata")
    learned_guard.check("it wrote to the learned tensors")
    return Output(values=values, with_lse=with_lse, rows=kept[: wrapped.num_actual_tokens])


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
    built, fields = there.to_device((built, fields))
    return attrs.evolve(builder.finish(built), **fields)


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
    """Return the rows of the packed batch that a chain keeps: all of them, or those that generate."""
    kept, num_kept = torch.arange(metadata.slot_mapping.shape[0]), metadata.num_actual_tokens
    generating = metadata.generating_indices_cpu
    if any(DROPS_TOKENS in each.effects for each in chain) and not metadata.all_generate and generating is not None:
        kept, num_kept = generating, metadata.num_generating
    expected = num_kept, len(kept)
    found = wrapped.num_actual_tokens, wrapped.slot_mapping.shape[0]
    if found != expected:
        raise ConformanceError(
            f"the chain keeps {found[0]} tokens, {found[1]} with padding, of {metadata.num_actual_tokens}, of which "
            f"{metadata.num_generating} generate"
        )
    return kept


class WriteGuard:
    """Tensors that must not be written to, with a copy of each."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._copies = [tensor.clone() for tensor in tensors]

    def holds(self) -> bool:
        """Return whether they are unchanged."""
        # Compared as bytes, because NaN is not equal to itself.
        pairs = zip(self._tensors, self._copies, strict=True)
        return all(torch.equal(_bytes(tensor), _bytes(copy)) for tensor, copy in pairs)

    def check(self, message: str) -> None:
        """Raise a ``ConformanceError`` with the message if one of them was written to."""
        if not self.holds():
            raise ConformanceError(message)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def tensors_of(metadata: CommonAttentionMetadata) -> list[torch.Tensor]:
    """Return every tensor of a step's metadata, including host tensors and those of extensions."""
    values = [*attrs.asdict(metadata, recurse=False).values()]
    for extension in metadata.extensions.values():
        values += [extension.values, extension.values_cpu]
    return [value for value in values if isinstance(value, torch.Tensor)]
