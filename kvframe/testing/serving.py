"""Runs several layers for several steps, and compares each layer's output with the reference.

Between steps, requests leave and join, the batch is reordered, and the inputs of the first step are overwritten: the
tensors of its metadata hold those of the second step, or zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import attrs
import numpy as np
import torch

from kvframe.attention.layers import Layers
from kvframe.attention.staging import HOST
from kvframe.attention.storage import KVCacheStorage
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import KVFrameError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.slots import Slots
from kvframe.contract.specs import LayerSpec
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import lay_out_cache
from kvframe.testing.case import Case, Inputs, Learned, Request, draw_inputs
from kvframe.testing.conformance import find_problem, make_reference
from kvframe.testing.effects import without_side_effects
from kvframe.testing.laws import ConformanceError
from kvframe.testing.metadata import make_metadata_of_groups
from kvframe.testing.pages import beside, fill, slots_of, write, written_tokens
from kvframe.testing.runs import Run
from kvframe.testing.staging import choose
from kvframe.testing.step import WITH_LSE, Attended, WriteGuard, attend_with_lse, check_output, pack, tensors_of

_BYSTANDER = "leaves"
"""A request that takes pages while the others get theirs, so that no request has consecutive pages."""


POISONS = (float("nan"), 1e4)
"""The values of all memory without live state, in turns. If a backend hides NaN, the large value shows the error."""


@without_side_effects
def check_run(
    backend_class: type[AttentionBackend], run: Run, device: str = "cpu", poisons: Sequence[float] = POISONS
) -> None:
    """Check that a backend's output is within the error bound of the dtype, and that it writes to no other memory.

    If it declares ``returns_lse``, what it writes for the log-sum-exp is compared too. ``poisons`` are the values of
    all memory without live state, in turns.
    """
    served = _Served(backend_class, run, torch.device(device))
    for step, poison in zip(range(len(run.steps)), cycle(poisons)):
        served.check_step(step, poison)


@attrs.frozen(eq=False)
class _Content:
    """A layer's tensors for the whole run: each request's, for all tokens that it ever has, and the learned ones."""

    requests: Mapping[str, Inputs]
    learned: Learned

    @classmethod
    def draw(cls, run: Run, layer: LayerSpec) -> _Content:
        lengths: dict[str, int] = {}
        for step in run.steps:
            lengths.update((name, request.seq_len) for name, request in step.items())
        requests = tuple(Request(0, length) for length in lengths.values())
        case = Case(name=f"{run.name}, {layer.name}", layer=layer, requests=requests, form=run.form)
        generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
        drawn = dict(zip(lengths, draw_inputs(case, generator), strict=True))
        first = next(iter(drawn.values()))
        for inputs in drawn.values():
            for name in ("key", "value", "read_key", "read_value"):
                getattr(inputs, name)[: run.num_shared] = getattr(first, name)[: run.num_shared]
        return cls(drawn, Learned.draw(case, generator))

    def of_step(self, step: Mapping[str, Request]) -> list[Inputs]:
        """Return the inputs of one step's case."""
        names = ("key", "value", "read_key", "read_value")
        return [
            Inputs(
                query=self.requests[name].query[request.num_computed : request.seq_len],
                **{field: getattr(self.requests[name], field)[: request.seq_len] for field in names},
            )
            for name, request in step.items()
        ]


class _Served:
    """The layers of a run, their cache, and the requests in it.

    Invariant: between steps, the pool holds the state of live tokens, and poison everywhere else.
    """

    def __init__(self, backend_class: type[AttentionBackend], run: Run, device: torch.device) -> None:
        self._class, self._run, self._device = backend_class, run, device
        self._poison = 0.0
        layers = run.layers
        grouping = group_layers(layers)
        longest = max(request.seq_len for step in run.steps for request in step.values())
        size = min(group.spec.block_size for group in grouping.groups)
        # The blocks of a step, and of the bystander.
        num_blocks = max(sum(-(-request.seq_len // size) for request in step.values()) for step in run.steps)
        page_bytes = max(group.page_bytes for group in grouping.groups) * len(grouping.groups) ** 2
        memory_bytes = page_bytes * (num_blocks + -(-longest // size) + 1)
        names = {name for step in run.steps for name in step}
        plan = lay_out_cache(grouping, memory_bytes=memory_bytes, max_model_len=longest, max_num_batched_tokens=longest)
        self._longest = longest
        self._storage = KVCacheStorage(plan, grouping, device)
        self._manager = KVCacheManager(plan, max_num_seqs=len(names) + 1, prefix_caching=run.num_shared > 0)
        self._token_ids = {
            name: [0] * run.num_shared + [number] * (longest - run.num_shared)
            for number, name in enumerate(sorted(names | {_BYSTANDER}), start=1)
        }
        choices = [choose(layer, backend_class) for layer in layers]
        self._attention = Layers(layers, choices, grouping, self._storage.views, device)
        self._contents = {layer.name: _Content.draw(run, layer) for layer in layers}
        for name, content in self._contents.items():
            if parameters := content.learned.to(device).parameters:
                self._attention[name].bind(parameters)
        self._running: set[str] = set()
        self._group_of = {layer.name: grouping.group_of(layer.name).index for layer in layers}
        self._metadata: tuple[CommonAttentionMetadata, ...] = ()

    def check_step(self, number: int, poison: float) -> None:
        """Compute a step, and compare each layer's output."""
        self._poison = poison
        step = self._packed(self._run.steps[number])
        run = attrs.evolve(self._run, steps=(*self._run.steps[:number], step, *self._run.steps[number + 1 :]))
        joined = self._give_pages(step)
        first = run.case(run.layers[0], number)
        self._poison_the_dead(first, step, joined)
        rows = [self._manager.row(name) for name in step]
        metadata = make_metadata_of_groups(first, self._manager, rows, HOST)
        for before in self._metadata:
            for tensor in tensors_of(before):
                tensor.zero_()
        metadata = tuple(map(_in_memory_of, self._metadata, metadata)) or metadata
        self._metadata = metadata
        guard = WriteGuard([tensor for common in metadata for tensor in tensors_of(common)])
        try:
            self._attention.begin_step(metadata)
            for layer in run.layers:
                common = metadata[self._group_of[layer.name]]
                self._check_layer(run.case(layer, number), self._contents[layer.name], step, common)
        except KVFrameError as error:
            if isinstance(error, ConformanceError):
                raise
            raise self._failure(first, str(error)) from error
        if not guard.holds():
            raise self._failure(first, "it wrote to the batch metadata")
        for name, request in step.items():
            self._manager.commit(name, self._token_ids[name], request.seq_len)

    def _packed(self, step: Mapping[str, Request]) -> dict[str, Request]:
        """Return a step's requests in the order in which an engine packs them."""
        order = self._attention.order_for(np.array([request.num_new for request in step.values()]))
        items = [*step.items()]
        return dict(items if order is None else [items[index] for index in order])

    def _give_pages(self, step: Mapping[str, Request]) -> set[str]:
        """Free requests that left, and give pages to the others; return the names of those that joined."""
        manager, joined = self._manager, set(step) - self._running
        for name in sorted(self._running - set(step)):
            manager.free(name)
        started = [name for name in step if name in joined]
        if self._run.num_shared:
            for name in started:
                self._start(name, step[name].num_computed)
        else:
            self._start_in_turns({name: step[name].num_computed for name in started})
        for name, request in step.items():
            self._extend(name, request.seq_len)
        self._running = set(step)
        return joined

    def _start(self, name: str, num_computed: int) -> None:
        """Start a request after the tokens that others have in common with it."""
        self._manager.start(name, self._token_ids[name])
        self._extend(name, num_computed)
        self._manager.commit(name, self._token_ids[name], num_computed)

    def _start_in_turns(self, started: Mapping[str, int]) -> None:
        """Start requests, which get pages in turns with one that leaves."""
        manager = self._manager
        for name in (*started, _BYSTANDER):
            manager.start(name, self._token_ids[name])
        size = min(group.block_size for group in manager.plan.groups)
        for length in range(size, self._longest + size, size):
            for name, num_computed in reversed([*started.items()]):
                self._extend(name, min(length, num_computed))
            self._extend(_BYSTANDER, min(length, self._longest))
        manager.free(_BYSTANDER)
        for name, num_computed in started.items():
            manager.commit(name, self._token_ids[name], num_computed)

    def _extend(self, name: str, num_tokens: int) -> None:
        has_capacity = self._manager.extend(name, num_tokens)
        assert has_capacity

    def _poison_the_dead(self, case: Case, step: Mapping[str, Request], joined: set[str]) -> None:
        """Keep only the live state of earlier steps in the pool, and add the cached tokens of requests that joined."""
        stay, names = [name for name in step if name not in joined], sorted(joined)
        live: dict[int, dict[str, torch.Tensor]] = {}
        slots: dict[int, dict[str, Slots]] = {}
        for layer in self._run.layers:
            index = self._group_of[layer.name]
            table = self._manager.tables[index]
            live[index] = {
                name: torch.tensor(
                    written_tokens(self._class, attrs.evolve(case, layer=layer), request), dtype=torch.int64
                )
                for name, request in step.items()
            }
            slots[index] = {
                name: Slots(slots_of(table, self._manager.row(name), tokens).to(self._device), table.block_size)
                for name, tokens in live[index].items()
            }
        live_state = [
            (tensor, slot, tensor[slot].clone())
            for layer in self._run.layers
            for tensor in self._storage.views[layer.name].values()
            for slot in (slots[self._group_of[layer.name]][name].places for name in stay)
        ]
        fill(self._storage, case, self._poison)
        for tensor, slot, values in live_state:
            tensor[slot] = values
        for layer in self._run.layers if joined else ():
            group, requests = self._group_of[layer.name], self._contents[layer.name].requests
            key = torch.cat([requests[name].key[live[group][name]] for name in names])
            value = torch.cat([requests[name].value[live[group][name]] for name in names])
            flat = torch.cat([slots[group][name].flat for name in names])
            joined_slots = Slots(flat, self._manager.tables[group].block_size)
            backend = self._attention[layer.name].step.group.backend
            try:
                write(backend, attrs.evolve(case, layer=layer), key, value, self._storage, joined_slots)
            except ConformanceError as error:
                raise self._failure(case, str(error)) from error

    def _check_layer(
        self, case: Case, content: _Content, step: Mapping[str, Request], metadata: CommonAttentionMetadata
    ) -> None:
        inputs, learned = content.of_step(step), content.learned.to(self._device)
        query, key, value = pack(case, inputs, self._poison, self._device)
        sinks = learned.sinks
        guard = WriteGuard([query, key, value, *([] if sinks is None else [sinks])])
        slots = Slots(metadata.slot_mapping.to(self._device), metadata.block_size)
        before = beside(self._storage, case, slots)
        layer, results = self._attention[case.layer.name], dict[str, Attended]()
        output = layer(query, key, value, sinks)
        try:
            results[""] = check_output(output, case, query), None
            if self._class.capabilities.returns_lse:
                kv_cache = self._storage.views[case.layer.name]
                results[WITH_LSE] = attend_with_lse(layer, kv_cache, query, sinks, case)
        except ConformanceError as error:
            raise self._failure(case, str(error)) from error
        if not torch.equal(before, beside(self._storage, case, slots)):
            raise self._failure(case, "it wrote to the cache beside the slots of the step")
        if not guard.holds():
            raise self._failure(case, "it wrote to the query, the keys, the values or the sinks")
        rows = torch.arange(metadata.num_actual_tokens)
        expected = make_reference(case, inputs, content.learned, with_lse=WITH_LSE in results)
        for how, attended in results.items():
            if problem := find_problem(case, expected, attended, rows):
                raise self._failure(case, how + problem)
        # A backend must not use these tensors in a later layer or step.
        for tensor in (query, key, value):
            tensor.fill_(self._poison)

    def _failure(self, case: Case, message: str) -> ConformanceError:
        return ConformanceError(f"{self._class.__name__} on {case.name}: {message}")


def _in_memory_of(before: CommonAttentionMetadata, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Return metadata in the memory of the step before if they have static shapes, as in a graph."""
    changes: dict[str, Any] = {}
    for field in attrs.fields(CommonAttentionMetadata) if metadata.static_shapes else ():
        old, new = getattr(before, field.name), getattr(metadata, field.name)
        if isinstance(new, torch.Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype):
            changes[field.name] = old.copy_(new)
    return attrs.evolve(metadata, **changes)
