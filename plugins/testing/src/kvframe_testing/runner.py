"""Runs layers of a backend, step by step, in a paged cache that holds poison in all memory that it must not read.

That is: other layers' parts of a page, tokens that are not live, the null page, free pages, the ends of blocks. A read
of such memory shows in the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from kvframe.attention.batch_metadata import StepBatch
from kvframe.attention.group import make_backend
from kvframe.attention.layer import AttentionLayer
from kvframe.attention.layers import Layers
from kvframe.attention.nested import replace_tensors
from kvframe.attention.request_order import Permutation, is_ordered, permute
from kvframe.attention.returned import refresh_fields, replace_fields
from kvframe.attention.staging import HOST, Staging
from kvframe.attention.storage import KVCacheStorage
from kvframe.attention.wrapping import apply_chain
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder, MoreInputs
from kvframe.contract.choice import ChosenTokens
from kvframe.contract.errors import BackendError
from kvframe.contract.formats import PLAIN
from kvframe.contract.merging import lse_dtype
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.slots import Slots
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import DROPS_TOKENS
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import plan_cache
from kvframe.selection.choice import Candidate, Choice, Identity, WrapperChain
from kvframe_testing.case import Case, Inputs, Learned, Request
from kvframe_testing.hosts import KVFRAME, Host, Memory
from kvframe_testing.laws import ConformanceError
from kvframe_testing.metadata import make_metadata_of_groups
from kvframe_testing.writes import WriteGuard, tensors_of

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

_BYSTANDER = "leaves"
"""A request that takes pages while the others get theirs, so that no request has consecutive pages."""


@attrs.frozen(eq=False)
class Content:
    """A layer's tensors.

    Attributes:
        requests: Those of each request, by name, for all tokens that it ever has, on the host.
        learned: The learned ones, on the device.
    """

    requests: Mapping[str, Inputs]
    learned: Learned


@attrs.frozen(eq=False)
class Output:
    """A layer's output in a step.

    Attributes:
        results: For the tokens that the chain keeps: of ``attend`` with metadata that is ``BUILT``, and ``REFRESHED``
            if its builder declares ``table_fields``; ``WITH_LSE`` if the backend returns the log-sum-exp, and
            ``WITHOUT_SINKS`` if the layer has learned sinks too.
        rows: ``[num_actual_tokens], int64, host``: the packed tokens that the chain keeps, without padding.
    """

    results: Mapping[str, Attended]
    rows: torch.Tensor


class Runner:
    """The layers of a backend on the pages of a pool, and the requests of each step.

    Invariant: when a layer is computed, the pool holds the state of live tokens, and poison everywhere else.

    Attributes:
        manager: The cache manager.
        attention: The layers, as their backend sees them.
        storage: The pool, or the other host's memory from the first step on.
    """

    storage: KVCacheStorage | Memory

    def __init__(
        self,
        backend_class: type[AttentionBackend],
        layers: Sequence[LayerSpec],
        steps: Sequence[Mapping[str, Request]],
        device: torch.device,
        *,
        host: Host = KVFRAME,
        num_shared: int = 0,
        in_pool: Sequence[LayerSpec] = (),
    ) -> None:
        """Make the layers, and a pool for the requests of any step.

        Args:
            backend_class: The backend of every layer.
            layers: The layers, as the backend sees them.
            steps: All steps to come: the work for each request, by name.
            device: Where the backend runs.
            host: Whose memory and step the backend is given.
            num_shared: The first tokens that all requests have in common, and whose pages they share.
            in_pool: The layers that keep state in the pool; ``layers`` unless given.
        """
        self._class, self._device, self._host, self._num_shared = backend_class, device, host, num_shared
        self._grouping = group_layers(in_pool or layers)
        requests = [request for step in steps for request in step.values()]
        self._longest = max(max(request.seq_len, request.num_new) for request in requests)
        size = min(group.spec.block_size for group in self._grouping.groups)
        # The blocks of a step, of the bystander, and the null page.
        num_blocks = max(sum(-(-request.seq_len // size) for request in step.values()) for step in steps)
        num_blocks += -(-self._longest // size) + 2
        page_bytes = max(group.page_bytes for group in self._grouping.groups) * len(self._grouping.groups) ** 2
        # The laws check a spec, so its answers are not checked for each case anew.
        plan = plan_cache(
            self._grouping,
            memory_bytes=page_bytes * num_blocks,
            max_model_len=self._longest,
            max_num_batched_tokens=self._longest,
            are_checked=True,
        )
        names = sorted({_BYSTANDER, *(name for step in steps for name in step)})
        self.manager = KVCacheManager(plan, max_num_seqs=len(names), prefix_caching=num_shared > 0)
        self._token_ids = {
            name: [0] * num_shared + [number] * (self._longest - num_shared)
            for number, name in enumerate(names, start=1)
        }
        views: Mapping[str, Any] = {}
        if not host.has_own_pages:
            self.storage = KVCacheStorage(plan, self._grouping, device)
            views = self.storage.views
        choices = [_choose(layer, backend_class) for layer in layers if layer.query is not None]
        try:
            self.attention = Layers(layers, choices, self._grouping, views, device)
        except BackendError as error:
            raise ConformanceError(str(error)) from error
        self._running: set[str] = set()
        self._writers: dict[str, AttentionBackend] = {}

    def bind(self, contents: Mapping[str, Content]) -> None:
        """Give layers their learned tensors, by the layers' names; once, before the first step."""
        for name, content in contents.items():
            layer, parameters = self.attention[name], content.learned.parameters
            if parameters:
                layer.bind(parameters)
            self._writers[name] = layer.step.group.backend
            if layer.spec.shares_with is not None:
                # The layer whose cache it shares stores the tokens.
                owner = attrs.evolve(layer.spec, name=layer.spec.shares_with, shares_with=None)
                (choice,) = self.attention.choices
                writer = make_backend(
                    self._class, [owner], self._device, choice.backend_options, lambda: self.attention.copies
                )
                self._writers[name] = writer
                if parameters:
                    writer.bind(owner, parameters)

    def group_of(self, layer: LayerSpec) -> int:
        """Return the index of a layer's cache group."""
        return self._grouping.group_of(layer.name).index

    # --- pages --------------------------------------------------------------------------------------------------------

    def give_pages(self, step: Mapping[str, Request]) -> set[str]:
        """Free requests that left, and give pages to the others; return the names of those that joined."""
        manager, new_names = self.manager, set(step) - self._running
        for name in sorted(self._running - set(step)):
            manager.free(name)
        num_cached_of = {name: request.num_cached for name, request in reversed([*step.items()]) if name in new_names}
        if self._num_shared:
            for name in [*num_cached_of][::-1]:
                manager.start(name, self._token_ids[name])
                self._extend(name, num_cached_of[name])
                manager.commit(name, self._token_ids[name], num_cached_of[name])
        elif num_cached_of:
            self._start_in_turns(num_cached_of)
        for name, request in step.items():
            self._extend(name, request.seq_len)
        self._running = set(step)
        return new_names

    def _start_in_turns(self, num_cached_of: Mapping[str, int]) -> None:
        """Start requests, which get pages in turns with one that leaves, so that none has consecutive pages."""
        manager = self.manager
        for name in (*num_cached_of, _BYSTANDER):
            manager.start(name, self._token_ids[name])
        size = min(group.block_size for group in manager.plan.groups)
        for length in range(size, self._longest + size, size):
            for name, num_cached in num_cached_of.items():
                self._extend(name, min(length, num_cached))
            self._extend(_BYSTANDER, min(length, self._longest))
        manager.free(_BYSTANDER)
        for name, num_cached in num_cached_of.items():
            manager.commit(name, self._token_ids[name], num_cached)

    def _extend(self, name: str, num_tokens: int) -> None:
        has_capacity = self.manager.extend(name, num_tokens)
        assert has_capacity

    def commit(self, step: Mapping[str, Request]) -> None:
        """Commit the tokens that a step computed."""
        for name, request in step.items():
            self.manager.commit(name, self._token_ids[name], request.seq_len)

    def prepare(
        self, cases: Sequence[Case], contents: Mapping[str, Content], step: Mapping[str, Request], poison: float
    ) -> None:
        """Give pages to a step's requests, and write what is in the cache before it.

        Of the memory, the live state of earlier steps stays, cached tokens of requests that joined are added, and all
        else is poison, which must not reach a backend's output.

        Args:
            cases: The case of each layer in the step.
            contents: The layers' tensors, by their names.
            step: The step's requests.
            poison: The value of all other memory.
        """
        new_names = self.give_pages(step)
        if self._host.has_own_pages:
            self.storage = self._host.begin(cases[0], self.manager, self._device)
        names, slots = sorted(new_names), dict[tuple[int, str], tuple[torch.Tensor, Slots]]()
        for case in cases:
            group = self.group_of(case.layer)
            table = self.manager.tables[group]
            for name, request in step.items():
                tokens = torch.tensor(self._written_tokens(case, request), dtype=torch.int64)
                blocks = torch.from_numpy(table.ids[self.manager.row(name)])[tokens // table.block_size].long()
                flat = blocks * table.block_size + tokens % table.block_size
                slots[group, name] = tokens, self._host.slots(flat.to(self._device), table.block_size)
        live_state = [
            (tensor, indices, tensor[indices].clone())
            for case in cases
            for tensor in self.storage.views[case.layer.name].values()
            for indices in (slots[self.group_of(case.layer), name][1].indices for name in step if name not in new_names)
        ]
        if cases[0].spec.kv_format == PLAIN:
            self.storage.pool.view(cases[0].stored_dtype).fill_(poison)
        else:
            # In any format, the parts of a page then hold NaN or large codes, or finite floats and such codes.
            self.storage.pool.fill_(0xFF if math.isnan(poison) else 0x5E)
        for tensor, indices, values in live_state:
            tensor[indices] = values
        for case in cases if names else ():
            group, requests = self.group_of(case.layer), contents[case.layer.name].requests
            parts = [(requests[name], *slots[group, name]) for name in names]
            key = torch.cat([inputs.key[tokens] for inputs, tokens, _ in parts])
            value = torch.cat([inputs.value[tokens] for inputs, tokens, _ in parts])
            flat = torch.cat([slots_of_request.flat for _, _, slots_of_request in parts])
            self.write(case, key, value, Slots(flat, self.manager.tables[group].block_size))

    def _written_tokens(self, case: Case, request: Request) -> list[int]:
        """Return the cached tokens that are written: live ones, and others in their pages if a backend reads those."""
        spec, end = case.spec, request.num_cached
        ranges = spec.live_ranges(end)
        if self._class.capabilities.reads_dead_tokens:
            size = spec.block_size
            ranges = tuple((start * size, min(stop * size, end)) for start, stop in spec.live_blocks(end))
        return [token for start, stop in ranges for token in range(max(start, request.num_hidden), stop)]

    def write(self, case: Case, key: torch.Tensor, value: torch.Tensor, slots: Slots) -> None:
        """Let the backend store tokens, and check that all other bytes are unchanged."""
        old_bytes = self._beside(case, slots)
        key, value = (self._host.rows(tensor).to(self._device) for tensor in (key, value))
        self._writers[case.layer.name].write_kv(key, value, self.storage.views[case.layer.name], slots)
        new_bytes = self._beside(case, slots)
        if not torch.equal(old_bytes, new_bytes):
            raise ConformanceError(f"write_kv changes {int((old_bytes != new_bytes).sum())} bytes beside its slots")

    def _beside(self, case: Case, slots: Slots) -> torch.Tensor:
        """Return a copy of the pool, ``[…], uint8, device``, with zeros in the layer's slots."""
        stored = [(tensor, tensor[slots.indices]) for tensor in self.storage.views[case.layer.name].values()]
        for tensor, values in stored:
            tensor[slots.indices] = torch.zeros_like(values)
        copy = self.storage.pool.clone()
        for tensor, values in stored:
            tensor[slots.indices] = values
        return copy

    def poison(self) -> None:
        """Fill all pages with NaN of any dtype of floats."""
        self.storage.pool.fill_(0xFF)

    # --- a step -------------------------------------------------------------------------------------------------------

    def rows(self, names: Iterable[str]) -> list[int]:
        """Return the requests' rows in the block tables."""
        return [self.manager.row(name) for name in names]

    def metadata(self, case: Case, names: Iterable[str]) -> tuple[CommonAttentionMetadata, ...]:
        """Return a step's metadata for each cache group, as kvframe's engine makes it or another host."""
        rows, host = self.rows(names), self._host
        device = self._device if host.has_own_pages else HOST
        exact = bool(case.wrappers) or self.attention.groups[0].builder.needs_exact_lens
        built_metadata = make_metadata_of_groups(case, self.manager, rows, device)
        return tuple(host.metadata(common, exact=exact) for common in built_metadata)

    def begin(self, metadata: Sequence[CommonAttentionMetadata], batch: StepBatch | None = None) -> None:
        """Build what the layers read in a step; another host then overwrites its copies of the metadata.

        ``batch`` is what the metadata was made of; it is needed for layers with entries.
        """
        guard = WriteGuard([tensor for common in metadata for tensor in tensors_of(common)])
        lent = [self._host.lend(common) for common in metadata]
        self.attention.begin_step([common for common, _ in lent], batch=batch, tables=self.manager.tables)
        for _, take_back in lent:
            take_back()
        guard.check("it wrote to the batch metadata")

    def compute(
        self,
        case: Case,
        inputs: Sequence[Inputs],
        learned: Learned,
        metadata: CommonAttentionMetadata,
        poison: float,
        chain: WrapperChain | None = None,
    ) -> Output:
        """Compute a layer in a step: store its tokens, and attend in each way that its backend offers.

        Args:
            case: The case of the layer in the step.
            inputs: The tensors of each request.
            learned: The learned tensors on the device.
            metadata: The metadata of its cache group.
            poison: The value of padded queries, keys and values, and of all of them afterwards.
            chain: Wrappers that are bound to the layer, after which the step begins here; None if it has begun.

        Raises:
            ConformanceError: The backend or a wrapper wrote where it must not, or returned something wrong.
            WrapperError: The chain refuses the step.
        """
        query, key, value = pack(case, inputs, poison, self._device)
        if not case.is_cross:
            for turn in self._host.turns(len(key)):
                # A token that is skipped must not reach a page.
                is_stored = turn.to(self._device)[:, None, None]
                flat = metadata.slot_mapping.to(self._device).masked_fill(~is_stored.view(-1), -1)
                stored_key, stored_value = (tensor.masked_fill(~is_stored, 1) for tensor in (key, value))
                self.write(case, stored_key, stored_value, Slots(flat, metadata.block_size))
        common, rows, permutation = metadata, torch.arange(len(query)), None
        group = self.attention[case.layer.name].step.group
        if chain is not None:
            guard = WriteGuard([self.storage.pool, *tensors_of(metadata)])
            common = apply_chain(chain, metadata)
            guard.check("a wrapper wrote to the batch metadata")
            rows = _kept_rows(chain, metadata, common)
            query = query.index_select(0, rows.to(self._device))
            order = group.builder.batch_order
            if order is not None and not is_ordered(order, common):
                common, permutation = permute(common, order)
            self.begin([common])
        learned_guard = WriteGuard(learned.tensors)
        unchanged = [self.storage.pool, *tensors_of(metadata), *tensors_of(common)]
        refresh = None if chain is None else partial(self._refresh, group.builder, common)
        results = self.attend(case, query, learned, permutation, refresh, unchanged)
        learned_guard.check("it wrote to the learned tensors")
        # A backend must not use these tensors in a later layer or step.
        for tensor in (query, key, value):
            tensor.fill_(poison)
        return Output(results, rows[: common.num_actual_tokens])

    def attend(
        self,
        case: Case,
        query: torch.Tensor,
        learned: Learned,
        permutation: Permutation | None = None,
        refresh: Callable[[], Any] | None = None,
        unchanged: Sequence[torch.Tensor] | None = None,
    ) -> dict[str, Attended]:
        """Return what a layer computes in the step that was begun, in each way that its backend offers.

        Args:
            case: The case of the layer in the step.
            query: ``[num_tokens, num_heads, head_size], device``.
            learned: The learned tensors on the device.
            permutation: The order in which the step was begun.
            refresh: Returns refreshed metadata, for a builder with ``table_fields``.
            unchanged: What the backend must not write to, like the query; None on a device without values.
        """
        layer, sinks = self.attention[case.layer.name], learned.sinks
        permutation, built = permutation or layer.step.read.permutation, layer.step.read.metadata
        chosen_tokens = None if case.query.choice is None else _choices(case, self._device)
        inverse: torch.Tensor | slice = slice(None)
        if permutation is not None:
            tokens, inverse = (indices.to(self._device) for indices in (permutation.tokens, permutation.inverse))
            query = query[tokens]
            chosen_tokens = None if chosen_tokens is None else chosen_tokens.rows(lambda rows: rows[tokens])
        query = self._host.rows(query)
        guard = WriteGuard([] if unchanged is None else [query, *unchanged])
        ways: list[tuple[str, Callable[[], Any], torch.Tensor | None]] = [(BUILT, lambda: built, sinks)]
        if self._class.capabilities.returns_lse:
            ways += [(WITH_LSE, lambda: built, sinks), (WITHOUT_SINKS, lambda: built, None)][: 1 + (sinks is not None)]
        if refresh is not None and layer.step.group.builder.table_fields is not None:
            ways.append((REFRESHED, refresh, sinks))
        results = {}
        for way, make_metadata, sink_logits in ways:
            try:
                output, lse = self._attend(layer, case, query, make_metadata(), sink_logits, chosen_tokens, way)
            except (BackendError, ConformanceError) as error:
                raise ConformanceError(f"{way}{error}") from error
            results[way] = output[inverse], None if lse is None else lse[inverse]
        guard.check("it wrote to the cache, the query or the batch metadata")
        return results

    def _attend(
        self,
        layer: AttentionLayer,
        case: Case,
        query: torch.Tensor,
        built: Any,
        sinks: torch.Tensor | None,
        choices: ChosenTokens | None,
        way: str,
    ) -> Attended:
        backend, kv_cache = layer.step.group.backend, self.storage.views[case.layer.name]
        shape, lse = (len(query), case.query.num_heads, case.form.head_size_v(case.spec)), None
        if way in (WITH_LSE, WITHOUT_SINKS):
            # It holds NaN until the backend writes there.
            lse = query.new_full(query.shape[:2], math.nan, dtype=lse_dtype(query.dtype))
        out, more = (self._host.make_output(shape, query), None if choices is None else MoreInputs(chosen=choices))
        values: Any = backend.attend(layer.spec, query, kv_cache, built, sinks=sinks, out=out, lse=lse, more=more)
        # A subclass is refused, because it could misreport its own values and comparisons.
        if type(values) is not torch.Tensor:
            raise ConformanceError(f"attend returns {type(values).__name__}, not torch.Tensor")
        expected_form = _say(shape, query.dtype, query.device, torch.strided)
        actual_form = _say(tuple(values.shape), values.dtype, values.device, values.layout)
        if actual_form != expected_form:
            raise ConformanceError(f"the output is {actual_form}, not {expected_form}")
        self._host.take_output(values)
        return values, lse

    def _refresh(self, builder: AttentionMetadataBuilder, common: CommonAttentionMetadata) -> Any:
        """Return metadata that were built for an empty table, then refreshed for this one as the framework does it."""
        build_device = self._device if builder.on_host is None else HOST
        common = replace_tensors(common, lambda tensor: tensor.to(build_device))
        empty: Any = {name: torch.zeros_like(getattr(common, name)) for name in ("block_table", "slot_mapping")}
        built_metadata = builder.build(attrs.evolve(common, **empty))
        refreshed = refresh_fields(builder, built_metadata, common)
        fields = {name: getattr(refreshed, name) for name in builder.table_fields or ()}
        built_metadata, fields = Staging(self._device).to_device((built_metadata, fields))
        return replace_fields(builder, builder.finish(built_metadata), fields)


def _choose(layer: LayerSpec, backend_class: type[AttentionBackend]) -> Choice:
    """Return the choice of a backend for a layer, without wrappers, with the kit's options."""
    options: Any = backend_class.options_class
    return Choice(
        layer=layer.name,
        wrappers=(),
        wrapper_ids=(),
        wrapped=layer,
        backend=backend_class.__name__,
        backend_class=backend_class,
        backend_options=None if options is None else options(**backend_class.conformance_options),
        backend_id=Identity.of("", backend_class),
        candidates=(Candidate(name=backend_class.__name__),),
    )


def pack(
    case: Case, inputs: Sequence[Inputs], poison: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the queries, keys and values of a step's new tokens, with poison as padding after them."""

    def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        new_rows = [tensor[-request.num_new :] for request, tensor in zip(case.requests, tensors, strict=True)]
        padding = new_rows[0].new_full((case.num_padding, *new_rows[0].shape[1:]), poison)
        return torch.cat([*new_rows, padding]).to(device)

    query, key, value = zip(*((request.query, request.key, request.value) for request in inputs), strict=True)
    return packed(query), packed(key), packed(value)


def _choices(case: Case, device: torch.device) -> ChosenTokens:
    """Return what the step's queries read, those of padding too."""
    assert case.query.choice is not None
    rows = torch.cat([case.chosen(index) for index in range(len(case.requests))])
    padding = rows.new_zeros(case.num_padding, *rows.shape[1:])
    return ChosenTokens(torch.cat([rows, padding]).to(device), case.query.choice.block_size)


def _kept_rows(
    chain: WrapperChain, metadata: CommonAttentionMetadata, wrapped_metadata: CommonAttentionMetadata
) -> torch.Tensor:
    """Return the rows of the packed batch that a chain keeps: all of them, or those that generate."""
    rows, num_rows = torch.arange(metadata.slot_mapping.shape[0]), metadata.num_actual_tokens
    generating_rows = metadata.generating_indices_cpu
    if any(DROPS_TOKENS in wrapper.effects for wrapper in chain) and not metadata.all_generate:
        rows, num_rows = (rows, num_rows) if generating_rows is None else (generating_rows, metadata.num_generating)
    num_wrapped, num_padded = wrapped_metadata.num_actual_tokens, wrapped_metadata.slot_mapping.shape[0]
    if (num_wrapped, num_padded) != (num_rows, len(rows)):
        raise ConformanceError(
            f"the chain keeps {num_wrapped} tokens, {num_padded} with padding, of {metadata.num_actual_tokens}, of "
            f"which {metadata.num_generating} generate"
        )
    return rows


def _say(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: torch.layout) -> str:
    where = "" if layout is torch.strided else f", {layout}"
    return f"{shape}, {dtype}, {device}{where}"
