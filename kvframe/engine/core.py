"""What every engine is made of: a model, its paged cache, a queue of requests, and the loop that serves them."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Generic, Protocol, Self

from kvframe.attention.choice import Choice
from kvframe.cache.keys import read_secret
from kvframe.cache.manager import KVCacheManager
from kvframe.checks import parse_bytes
from kvframe.engine.admission import Admission
from kvframe.engine.assembly import Assembly, assemble, assemble_plain, load_model
from kvframe.engine.cache_events import CacheEventDelivery, CacheListener
from kvframe.engine.interrupts import HeldInterrupts
from kvframe.engine.progress import RequestT
from kvframe.engine.request_table import RequestTable
from kvframe.engine.resizing import resize
from kvframe.engine.runner import SkipPolicy
from kvframe.engine.scheduled import ScheduledStep
from kvframe.engine.scheduler import Scheduler
from kvframe.engine.self_check import run_packed
from kvframe.engine.stats import EngineStats
from kvframe.errors import KVFrameError, ModelError, PlanError, RequestError
from kvframe.eviction_choice import make_policy
from kvframe.groups import Grouping
from kvframe.model.adapter import LoadedModel
from kvframe.plan import KVCachePlan
from kvframe.registry import Registry
from kvframe.specs import LayerSpec
from kvframe.stack import Stack

_log = logging.getLogger("kvframe")


class Runner(Protocol[RequestT]):
    """Runs steps; what comes of a request's last known token is one number, as the scheduler takes it."""

    @property
    def has_graphs(self) -> bool:
        """Whether steps may be replayed from graphs."""

    def warm_up(self) -> None:
        """Do once, before the first request, what would make it wait."""

    def run(self, step: ScheduledStep[RequestT]) -> list[int]:
        """Compute a step and return an outcome for each request whose last known token it computes."""


class EngineCore(ABC, Generic[RequestT]):
    """Set-up and life of an engine. What is asked of the model, and what comes back, a subclass says.

    Attributes:
        model: The model.
        stack: The stack that was asked for.
        grouping: The cache groups.
        plan: What is allocated.
        choices: For each layer, its wrapper chain, the backend that was chosen, and why the others were not.
    """

    def __init__(
        self,
        model: LoadedModel,
        layers: Sequence[LayerSpec],
        *,
        registry: Registry,
        stack: Stack | None = None,
        poison_freed: bool = False,
        skip_policy: SkipPolicy | None = None,
    ) -> None:
        """Plan and allocate the cache, choose backends, and attach the model.

        Args:
            model: A loaded model, not attached.
            layers: Its layer specs, as ``make_layer_specs`` returns them.
            registry: Where backends and wrappers are looked up.
            stack: Memory, limits and rules; the defaults unless given.
            poison_freed: Fill pages with NaN at first and when their content ends, so that a read of state that is
                not there shows. For tests.
            skip_policy: Whether layers that can skip tokens of a step do so; always unless given.

        Raises:
            StackError: The stack asks for longer requests than the model takes, for prefill skipping of a model that
                cannot leave rows out, or gives a wrapper or backend options that it does not have.
            PlanError: The memory is too small.
            WrapperError: A wrapper cannot serve a layer, or may not stand where it does in its chain.
            UnknownNameError: A cache spec's default chain names a wrapper that no plugin registers.
            PluginError: A wrapper cannot be imported.
            BackendError: No backend serves a layer, the one that was named cannot, or one could not be set up.
            ModelError: The model cannot be attached or compiled, or computes something else than it does by itself.
        """
        self.model = model
        self.stack = stack = Stack() if stack is None else stack
        self._secret = read_secret(stack.cache.key, stack.source)
        assembly = assemble(model, layers, stack, registry)
        self.grouping: Grouping = assembly.grouping
        self._check_model()
        self.plan: KVCachePlan = assembly.plan
        self.choices: tuple[Choice, ...] = assembly.choices
        self._storage = assembly.storage
        self._max_model_len = assembly.max_model_len
        max_num_seqs, max_num_tokens = stack.engine.max_num_seqs, stack.engine.max_num_batched_tokens
        whole_prompts = self.grouping.whole_prompts
        if self.grouping.note is not None:
            _log.info("%s: %s", model.description.name, self.grouping.note)
        self._admission = Admission(
            model,
            self.plan,
            self._max_model_len,
            self._secret,
            max_prompt_len=max_num_tokens if whole_prompts else None,
        )
        self._manager = KVCacheManager(
            self.plan,
            max_num_seqs=max_num_seqs,
            prefix_caching=stack.cache.prefix_caching and not whole_prompts,
            host_pages=assembly.host,
            copier=self._storage.copy_pages,
            audited=stack.cache.audit,
            eviction=make_policy(stack, registry),
        )
        self._cache_events = CacheEventDelivery(self._manager, self._secret)
        if poison_freed:
            self._storage.poison()
            assembly.layers.local.is_poisoned = True
            self._manager.on_pages_freed = lambda group, block_ids: self._storage.fill(group, block_ids, math.nan)
        self._scheduler: Scheduler[RequestT] = Scheduler(
            self._manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_tokens,
            shared_block_size=self.plan.alignment if self._manager.prefix_caching else 0,
            whole_prompts=whole_prompts,
            reserve_prompts=stack.engine.reserve_prompts,
        )
        self._runner = self._make_runner(assembly, skip_policy)
        self._requests: RequestTable[RequestT] = RequestTable()
        checked = assemble_plain(assembly, layers, registry) if stack.engine.self_check else assembly
        model.attach(checked.layers)
        try:
            if stack.engine.compile:
                model.compile()
            if stack.engine.self_check:
                model.self_check(partial(run_packed, checked))
            if checked is not assembly:
                model.detach()
                model.attach(assembly.layers)
            self._runner.warm_up()
        except BaseException:
            model.detach()
            raise

    def _check_model(self) -> None:
        """Refuse a model that is not for this kind of engine, with a ``ModelError``."""

    @abstractmethod
    def _make_runner(self, assembly: Assembly, skip_policy: SkipPolicy | None) -> Runner[RequestT]:
        """Return what computes the engine's steps."""

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        stack: Stack | None = None,
        plugins: Sequence[ModuleType] = (),
        poison_freed: bool = False,
        skip_policy: SkipPolicy | None = None,
    ) -> Self:
        """Load a model from disk and make an engine for it: the whole flow.

        Args:
            path: A model's folder, of a kind that an installed plugin recognises.
            stack: What to use; the defaults unless given.
            plugins: Manifest modules to use beside the installed plugins.
            poison_freed: As for the constructor.
            skip_policy: As for the constructor.

        Raises:
            KVFrameError: What is wrong with the stack, a plugin it names, the model or the memory.
        """
        stack = Stack() if stack is None else stack
        model, layers, registry = load_model(Path(path), stack, plugins)
        return cls(model, layers, registry=registry, stack=stack, poison_freed=poison_freed, skip_policy=skip_policy)

    # --- requests -----------------------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        """End a request now, all samples of it, and give its blocks back; its last output comes with the next ``step``.

        Args:
            request_id: The request; one that has ended, or is not known, is passed over.
        """
        for each in self._requests.samples_of(request_id):
            request = self._requests[each]
            if request.finish_reason is None:
                with HeldInterrupts():
                    self._scheduler.end(request, "aborted")
                    self._requests.note([request])

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has something to do or to report."""
        return self._scheduler.has_work or bool(self._requests.with_news)

    def stats(self) -> EngineStats:
        """Return what the engine did so far."""
        return EngineStats.of(self._scheduler.stats, self._manager.stats, self._storage.pool.numel())

    def reset_prefix_cache(self) -> None:
        """Give up every cached prefix, pinned ones too; running requests are not touched."""
        self._manager.reset_prefix_cache()
        self._cache_events.deliver()

    @property
    def on_cache_events(self) -> CacheListener | None:
        """Who is told which blocks requests find and which no more, in order; None for nobody, which costs nothing.

        Called after each step in which something changed, and when the cache is reset or resized, with a list of
        ``kvframe.BlocksStored``, ``BlocksRemoved`` and ``CacheCleared``. Whoever is set is first told of all that is
        cached, after a ``CacheCleared``: replaying what it is told always gives what the cache holds. Keys of blocks
        are those of ``kvframe.prefix_key`` under the secret of the stack's ``[cache] key``; without one, under a secret
        of the engine's own. A listener that raises is logged, and told nothing any more; one that Ctrl-C interrupts is
        told all that is cached the next time. It must not call the engine.
        """
        return self._cache_events.listener

    @on_cache_events.setter
    def on_cache_events(self, listener: CacheListener | None) -> None:
        self._cache_events.listener = listener

    def resize_cache(self, memory: int | str) -> None:
        """Give the cache more memory, or less, between steps; requests go on.

        Cached prefixes stay, but for those at the end of a cache that shrinks. Requests that run there are preempted,
        the last ones first. While it moves, the device holds the cache twice.

        Args:
            memory: The most bytes for it; may be given like ``"2GiB"``.

        Raises:
            PlanError: It would be too small for a request that goes on or for what is pinned, the device has no such
                memory, or the engine replays graphs, which know where the cache lies. The cache is as it was.
            StackError: That is no size.
        """
        if self._runner.has_graphs:
            raise PlanError(
                "an engine that replays graphs cannot resize its cache, which they read where it lies; set graphs to "
                '"off" in the stack\'s [engine], or make another engine'
            )
        going_on = [request for request in self._requests.values() if request.finish_reason is None]
        try:
            with HeldInterrupts():
                self.plan = self._admission.plan = resize(
                    self._manager, self._storage, self._scheduler, going_on, parse_bytes(memory)
                )
        finally:
            self._cache_events.deliver()

    def close(self) -> None:
        """End every request and leave the model as it was. Safe to call twice."""
        for request_id in list(self._requests):
            self._forget(request_id)
        self.model.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- for subclasses -----------------------------------------------------------------------------------------------

    def _new_id(self, request_id: str | None) -> str:
        """Return a fresh id, or the one that was asked for; raises ``RequestError`` if that is taken."""
        if request_id is None:
            return self._requests.fresh_id()
        if self._requests.samples_of(request_id):
            raise RequestError(f"a request {request_id!r} is in the engine already", code="duplicate_id")
        return request_id

    def _add(self, request: RequestT) -> None:
        self._requests.add(request)
        self._scheduler.add(request)

    def _serve(
        self, num_requests: int, add: Callable[[int], str], on_progress: Callable[[int], None] | None
    ) -> list[list[RequestT] | KVFrameError]:
        """Serve a batch of requests to their ends.

        Args:
            num_requests: How many.
            add: Adds a request by its place in the batch and returns its id, or raises a ``RequestError``, or a
                ``ModelError`` for what the model cannot do.
            on_progress: Called after each step with the number of requests that are done, refused ones included.

        Returns:
            For each place, its request, all samples of it, or why it was refused.

        Raises:
            ModelError: None can be served, and this is why one cannot.
        """
        request_ids: dict[int, list[str]] = {}
        ended: dict[int, list[RequestT] | KVFrameError] = {}
        unable: ModelError | None = None
        try:
            for index in range(num_requests):
                try:
                    request_ids[index] = self._requests.samples_of(add(index))
                except RequestError as error:
                    ended[index] = error
                except ModelError as error:
                    ended[index] = unable = error
            if unable is not None and not request_ids:
                raise unable
            pending = [[self._requests[each] for each in samples] for samples in request_ids.values()]
            while pending:
                self._advance()
                pending = [samples for samples in pending if any(each.finish_reason is None for each in samples)]
                if on_progress is not None:
                    on_progress(num_requests - len(pending))
            for index, samples in request_ids.items():
                ended[index] = [self._requests.take(each) for each in samples]
        finally:
            # Only where an exception cut it short is anything left.
            for samples in request_ids.values():
                for each in samples:
                    self._forget(each)
        return [ended[index] for index in range(num_requests)]

    def _advance(self) -> None:
        """Compute one batch and note who has something new."""
        with HeldInterrupts() as interrupts:
            try:
                step = self._scheduler.schedule()
            finally:
                self._requests.note(self._scheduler.take_failed())
            if step is None:
                return
            try:
                with interrupts.let_through():
                    outcomes = self._runner.run(step)
            except BaseException as error:
                failed = self._scheduler.fail(step, f"the step failed: {type(error).__name__}: {error}")
                self._requests.note(failed)
                raise
            try:
                self._requests.note(self._scheduler.complete(step, outcomes))
            finally:
                self._requests.note(self._scheduler.take_failed())
        self._cache_events.deliver()

    def _forget(self, request_id: str) -> None:
        """End a request that its owner gave up, one sample of it, without a report."""
        with HeldInterrupts():
            request = self._requests.remove(request_id)
            if request is not None:
                self._scheduler.end(request, "aborted")
