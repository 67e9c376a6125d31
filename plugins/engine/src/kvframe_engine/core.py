"""What generating and embedding engines share: model, paged cache, queue of requests and serving loop."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic
from types import ModuleType, TracebackType
from typing import Any, Generic, Literal, Protocol, Self, get_args

import attrs
from kvframe_stores import choose_secret

from kvframe import Choice, KVCachePlan, Setup, Stack, load_model
from kvframe.contract.errors import KVFrameError, ModelError, RequestError, shown
from kvframe.contract.foreign import refuse_exit
from kvframe.contract.model import LoadedModel
from kvframe_engine.assembly import Assembly, assemble
from kvframe_engine.cache_events import CacheEventDelivery, CacheListener
from kvframe_engine.contract.errors import EngineError
from kvframe_engine.event_feed import EventFeed
from kvframe_engine.parts import (
    attach_models,
    make_admission,
    make_manager,
    make_page_stores,
    make_scheduler,
    make_stored_pages,
    make_tiers,
)
from kvframe_engine.pipeline import StepPipeline
from kvframe_engine.prefixes.fingerprint import fingerprint_of
from kvframe_engine.ranks.environment import find_rank
from kvframe_engine.ranks.follower import Follower
from kvframe_engine.ranks.joining import join_ranks
from kvframe_engine.ranks.leader import RANKS_ENDED, Leader
from kvframe_engine.requests.progress import RequestT, RequestTable
from kvframe_engine.resizing import resize
from kvframe_engine.running.model_runner import ModelRunner, SkipPolicy
from kvframe_engine.scheduling.scheduler import Scheduler
from kvframe_engine.scheduling.stats import EngineStats
from kvframe_engine.scheduling.step import Outcomes, ScheduledStep
from kvframe_engine.step_trace import StepTrace
from kvframe_engine.tiers.tiers import CLOSE_SECONDS
from kvframe_engine.turns import Turns, verb, verb_when_closed

_log = logging.getLogger("kvframe")

MAX_ID_CHARS = 1024
"""The most characters of a request's id."""

STEP_FAILED = "the step that computed this request failed; the exception that the engine raised says why"
"""The error of every request of a failed step. It leaves the exception out, which may hold another request's data."""


WhenWeightsChange = Literal["recompute", "fail"]
"""What happens to running requests if the weights change."""


class Runner(Protocol[RequestT]):
    """Runs steps. For a request's last known token it returns a number, or several, which the scheduler takes."""

    @property
    def num_replays(self) -> int:
        """How often a captured step was replayed."""

    def warm_up(self) -> None:
        """Do the slow work of a first step, before the first request has to wait for it."""

    def drop_graphs(self) -> None:
        """Forget the captured graphs; each is captured again when a step needs it."""

    def run(self, step: ScheduledStep[RequestT]) -> Outcomes:
        """Compute a step. Return the outcome of each request whose last known token the step computes."""


class EngineCore(ABC, Generic[RequestT]):
    """Sets an engine up, runs its steps and closes it. Subclasses define the requests to the model and its outputs.

    Attributes:
        model: The model.
        stack: The stack that was asked for.
        grouping: The cache groups.
        plan: The cache plan.
        choices: For each layer, its wrapper chain, the chosen backend, and why the other backends were not chosen.
        on_failed_rank: Called before this process ends because another rank failed; None, the default, for nothing. A
            thread of the engine calls it, while a verb may wait for the failed rank, so it must call no verb. It can
            tell clients that their requests have ended. The process ends when it returns, or after one second.
    """

    def __init__(
        self,
        model: LoadedModel,
        setup: Setup,
        *,
        poison_freed: bool = False,
        skip_policy: SkipPolicy | None = None,
        ranks: Leader | Follower | None = None,
    ) -> None:
        """Plan and allocate the cache, choose backends, and attach the model.

        Args:
            model: A loaded model, not attached.
            setup: What a stack does with it. The stack's device is the one that the model is on.
            poison_freed: Fill pages with NaN when they are allocated and when they are freed, so that a read of missing
                state shows. For tests.
            skip_policy: Decides in each step whether layers that can skip tokens do so; they always do unless given.
            ranks: The ranks that have the other shares of the model, as ``from_pretrained`` joins them; None for none.

        Raises:
            StackError: The stack asks for longer requests than the model takes, asks for prefill skipping of a model
                that cannot leave rows out, or gives a wrapper or a backend options that it does not have.
            PlanError: The memory is too small.
            WrapperError: A wrapper cannot serve a layer, or is at a wrong place in its chain.
            UnknownNameError: A cache spec's default chain names a wrapper that no plugin registers.
            PluginError: A wrapper cannot be imported.
            BackendError: No backend serves a layer, the named backend cannot serve it, a backend could not be set up,
                or a backend computes a layer wrongly.
            ModelError: The model cannot be attached or compiled, or attached it computes something else than
                unattached.
        """
        stack = setup.stack.with_device()
        setup = attrs.evolve(setup, stack=stack)
        stores = make_page_stores(setup)
        self._secret = choose_secret(stack, stores)
        assembly = assemble(model, setup, ranks)
        self.model, self.stack, self._registry = model, stack, setup.registry
        self.setup, self.grouping = assembly.setup, assembly.setup.grouping
        self.plan: KVCachePlan = assembly.plan
        self.choices: tuple[Choice, ...] = assembly.choices
        self._max_model_len = assembly.max_model_len
        self._storage, self._host, self._ranks = assembly.storage, assembly.host, ranks
        self._draft: LoadedModel | None = None if assembly.draft is None else assembly.draft.model
        self._check_model()
        if self.grouping.note is not None:
            _log.info("%s: %s", model.description.name, self.grouping.note)
        self._turns, self._step_began = Turns(), 0.0
        self.on_failed_rank: Callable[[], None] | None = None
        self._requests: RequestTable[RequestT] = RequestTable()
        self._admission = make_admission(assembly, self._secret)
        self._manager = make_manager(assembly, poison_freed=poison_freed)
        self._cache_events = CacheEventDelivery(self._manager, self._secret, self._turns.let_through)
        self._pages = make_stored_pages(
            assembly, stores, self._secret, lambda: fingerprint_of(model, self._draft), ranks
        )
        # The ranks after rank 0 move the pages that rank 0 names.
        leads = not isinstance(ranks, Follower)
        self._tiers = make_tiers(assembly, self._manager, self._pages, self._secret) if leads else None
        self._scheduler: Scheduler[RequestT] = make_scheduler(assembly, self._manager, self._tiers, proposes=leads)
        self._trace: StepTrace[RequestT] | None = None
        self._runner = self._make_runner(assembly, skip_policy)
        self._pipeline = self._make_pipeline()
        attach_models(
            assembly,
            self._runner.warm_up,
            has_ranks=ranks is not None,
            with_hidden_states=self._scheduler.hidden_states is not None,
        )
        # None if it is not known, or was warned about.
        self._weights_version = model.weights_version()
        self._log_start()
        if isinstance(ranks, Leader):
            assert isinstance(self._runner, ModelRunner)
            ranks.lead(
                self._runner,
                self._manager.tables,
                on_failed_step=self._turns.close,
                before_end=self._before_end,
                max_step_seconds=stack.engine.max_step_seconds,
            )
        publisher = None if isinstance(ranks, Follower) else self.setup.make_event_publisher()
        if publisher is not None:
            self._cache_events.publish_to(EventFeed(publisher))

    def _log_start(self) -> None:
        """Log in one line what serves the model."""
        backends = sorted({choice.backend for choice in self.choices})
        options = self.stack.model
        tiers = () if self._tiers is None else self._tiers.names
        _log.info(
            "%s runs on %s; attention by %s; a cache of %.1f MiB%s%s",
            self.model.description.name,
            # The constructor is given a model that is loaded already, in any dtype.
            options.device if options.dtype == "auto" else f"{options.device} in {options.dtype}",
            ", ".join(backends) or "nothing, as no layer attends",
            self.plan.total_bytes / (1 << 20),
            f"; prefixes also in {', '.join(tiers)}" if tiers else "",
            self._overlap_note(),
        )

    def _overlap_note(self) -> str:
        """Return in a clause whether steps overlap, if that is worth a word."""
        if self._pipeline is not None:
            return "; the next step is launched while one is computed"
        if self._scheduler.max_drafts and self.stack.engine.overlap == "auto":
            return "; steps do not overlap, because the accepted drafts of one decide what the next one computes"
        return ""

    def _check_model(self) -> None:
        """Raise a ``ModelError`` for a model that this kind of engine cannot serve."""

    @abstractmethod
    def _make_runner(self, assembly: Assembly, skip_policy: SkipPolicy | None) -> Runner[RequestT]:
        """Return the runner, which computes the engine's steps."""

    def _make_pipeline(self) -> StepPipeline[RequestT] | None:
        """Return what keeps a step on the device while the host works; None if steps are computed one by one."""
        return None

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

        If torchrun started several processes, each of them calls this, and each loads its share of the model. Rank 0
        returns the engine. The other ranks compute what it asks for, and end with ``SystemExit`` when it is closed.

        Args:
            path: A model's folder, of a kind that an installed plugin recognises.
            stack: What to use; the defaults unless given.
            plugins: Manifest modules to use beside the installed plugins.
            poison_freed: As for the constructor.
            skip_policy: As for the constructor.

        Raises:
            KVFrameError: The stack, a plugin that it names, the model or the memory is wrong.
        """
        return cls._set_up(path, stack, plugins, poison_freed=poison_freed, skip_policy=skip_policy)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any = None,
        *,
        stack: Stack | None = None,
        plugins: Sequence[ModuleType] = (),
        poison_freed: bool = False,
        skip_policy: SkipPolicy | None = None,
    ) -> Self:
        """Make an engine for a model that is in memory, such as one that is being trained.

        The model stays its owner's. While the engine exists, the model's own forward, ``backward`` and ``generate``
        compute as before; only inside the engine's ``step`` does it read the paged cache, in evaluation mode. Call it
        and the engine from one thread. After its weights have changed, call ``weights_changed``.

        Args:
            model: A transformers model, or what an installed plugin knows.
            tokenizer: Its tokenizer; None if prompts are token ids.
            stack: What to use; the defaults unless given. The model's own device and dtype replace those of its
                ``[model]``.
            plugins: Manifest modules to use beside the installed plugins.
            poison_freed: As for the constructor.
            skip_policy: As for the constructor.

        Raises:
            KVFrameError: The stack, a plugin that it names, the model or the memory is wrong.
        """
        return cls._take(model, tokenizer, stack, plugins, poison_freed=poison_freed, skip_policy=skip_policy)

    @classmethod
    def _take(
        cls, model: Any, tokenizer: Any, stack: Stack | None, plugins: Sequence[ModuleType], **options: Any
    ) -> Self:
        """Make an engine with ``options`` for a model that is in memory."""
        return cls(*load_model(model, stack, tokenizer=tokenizer, plugins=plugins), **options)

    @classmethod
    def _set_up(
        cls,
        path: str | Path,
        stack: Stack | None,
        plugins: Sequence[ModuleType],
        **options: Any,
    ) -> Self:
        """Load a model and make an engine with ``options`` for it, on every rank; only rank 0 returns it."""
        stack, process = (Stack() if stack is None else stack).with_device(), find_rank()
        if process is None:
            return cls(*load_model(path, stack, plugins=plugins), **options)
        with join_ranks(process, stack) as (ranks, stack):
            engine = cls(*load_model(path, stack, plugins=plugins), ranks=ranks, **options)
            if isinstance(ranks, Follower):
                assert isinstance(engine._runner, ModelRunner)
                ranks.follow(
                    engine._runner,
                    engine._manager.tables,
                    engine._storage,
                    engine._host,
                    engine._pages,
                    max_step_seconds=stack.engine.max_step_seconds,
                )
        if isinstance(ranks, Follower):
            engine.close()
            raise SystemExit(0)
        return engine

    # --- requests -----------------------------------------------------------------------------------------------------

    @verb
    def abort(self, request_id: str) -> None:
        """End all samples of a request now and free their blocks; the next ``step`` returns their last outputs.

        Args:
            request_id: The request. An id that is unknown, or whose request has ended, is ignored.

        Raises:
            RequestError: ``request_id`` is not an id (``bad_id``).
        """
        for sample_id in self._requests.samples_of(_checked_id(request_id)):
            request = self._requests[sample_id]
            if request.finish_reason is None:
                self._scheduler.end(request, "aborted")
                self._requests.note([request])
        self._end_unneeded_step()

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has something to compute or to report; False once the engine is closed."""
        return not self.is_closed and (self._scheduler.has_work or bool(self._requests.unreported))

    @property
    def is_closed(self) -> bool:
        """Whether the engine serves no more: after ``close``, or after a step over several ranks has failed."""
        return self._turns.is_closed

    @property
    def step_seconds(self) -> float:
        """How many seconds the running step has taken so far; 0 between steps. Any thread may read it at any time."""
        began = self._step_began
        return monotonic() - began if began else 0.0

    def stats(self) -> EngineStats:
        """Return the engine's counters. It can be called at any time: during a verb, and after ``close``."""
        scheduler = self._scheduler
        return EngineStats.of(
            scheduler.stats,
            self._manager.stats,
            self._storage.pool.numel(),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            graph_replays=self._runner.num_replays,
            tiers={} if self._tiers is None else self._tiers.stats(),
        )

    @verb
    def reset_prefix_cache(self) -> None:
        """Remove every cached prefix, pinned ones too; running requests keep their blocks."""
        self._settle()
        self._weights_may_have_changed()
        self._manager.reset_prefix_cache()
        self._cache_events.deliver()

    @verb
    def weights_changed(self, *, running: WhenWeightsChange = "recompute") -> None:
        """Drop what was computed with the old weights. Call it between steps, after the model's weights were changed.

        Every cached prefix is removed, pinned ones too. Captured graphs are captured again when they are needed.

        Args:
            running: What happens to unfinished requests. ``"recompute"``: they keep their tokens, and the state of
                these is computed again with the new weights. ``"fail"``: those that have started end with
                ``finish_reason="error"``.

        Raises:
            RequestError: ``running`` is something else (``bad_params``). Nothing was changed.
            EngineError: The model is divided over several ranks (``several_ranks``). Nothing was changed.
            ModelError: The new weights cannot be served.
        """
        if running not in get_args(WhenWeightsChange):
            raise RequestError(f'running must be "recompute" or "fail", not {shown(running)}', code="bad_params")
        if self._ranks is not None:
            raise EngineError(
                "the weights of a model that is divided over several ranks cannot be changed while it is served; "
                "make another engine",
                code="several_ranks",
            )
        self._settle()
        for request in self._scheduler.restart_all():
            if running == "fail":
                request.error = "the model's weights changed before it had ended"
                self._scheduler.end(request, "error")
                self._requests.note([request])
        self._weights_may_have_changed()
        self._manager.reset_prefix_cache()
        self._cache_events.deliver()
        for model in (self.model, self._draft):
            if model is not None:
                model.weights_changed()
        self._weights_version = self.model.weights_version()
        self._runner.drop_graphs()

    @property
    def on_cache_events(self) -> CacheListener | None:
        """The listener to cache events, which gets them in order. None, the default, costs nothing.

        It is called after each step that changed the cache, and when the cache is reset or resized, with a list of
        ``kvframe.BlocksStored``, ``BlocksRemoved`` and ``CacheCleared``. It gets them beside the publisher of the
        stack's ``[cache] events``, if there is one. A new listener first gets a ``CacheCleared``
        and events for all that is cached, so a replay of its events always gives the content of the cache. The keys of
        blocks are those of ``kvframe.prefix_key`` under the secret of the stack's ``[cache] key``, or under a secret of
        the engine if the stack has none. If a listener raises, the exception is logged and the listener is removed. If
        Ctrl-C interrupts a listener, its next call reports all that is cached. A listener may call ``stats``, and no
        verb of the engine.
        """
        return self._cache_events.listener

    @on_cache_events.setter
    def on_cache_events(self, listener: CacheListener | None) -> None:
        self._set_listener(listener)

    @verb
    def start_trace(self) -> StepTrace[RequestT]:
        """Record from now on what each step computes; an earlier recording ends.

        The recording grows with each step. Call ``stop_trace`` when it is long enough.
        """
        self._settle()
        self._trace = StepTrace(self._scheduler, self._manager)
        return self._trace

    @verb
    def stop_trace(self) -> None:
        """End the recording, if there is one."""
        self._settle()
        self._trace = None

    @verb
    def resize_cache(self, memory: int | str) -> None:
        """Give the cache more memory, or less, between steps; requests continue.

        Cached prefixes stay, except those at the end of a cache that shrinks. Running requests with blocks there are
        preempted, the one admitted last first. During the move, the device holds both the old and the new cache.
        Captured graphs hold the old cache's addresses, so each is captured again when a step needs it.

        Args:
            memory: The most bytes that the cache may take; may be given like ``"2GiB"``.

        Raises:
            PlanError: The new cache would be too small for an unfinished request or for the pinned prefixes, or the
                device does not have enough memory. The cache is unchanged.
            StackError: ``memory`` is not a size.
        """
        self._settle()
        going_on = [request for request in self._requests.values() if request.finish_reason is None]
        try:
            plan = resize(self._manager, self._storage, self._scheduler, going_on, memory)
        finally:
            self._cache_events.deliver()
        if plan.total_bytes != self.plan.total_bytes:
            self._runner.drop_graphs()
        self.plan = self._admission.plan = plan

    @verb
    def flush_page_stores(self, seconds: float = 60.0) -> bool:
        """Wait until the stack's page stores have the pages of all requests that have ended.

        Args:
            seconds: How long to wait at most.

        Returns:
            Whether they were given everything in that time. Pages that a store refused are not waited for.
        """
        self._settle()
        return self._tiers is None or self._tiers.flush(seconds)

    @verb_when_closed
    def close(self) -> None:
        """End every request and detach the model, which then computes as before. Safe to call twice.

        After it, every verb but ``close`` raises ``EngineError`` (``closed``), and ``has_unfinished`` is False;
        ``stats`` still answers.
        """
        self._turns.close()
        self._forget(list(self._requests.values()))
        if self._tiers is not None:
            self._tiers.close()
        elif self._pages is not None:
            self._pages.close(CLOSE_SECONDS)
        if self._ranks is not None:
            self._ranks.close()
        self._cache_events.close(CLOSE_SECONDS)
        self.model.detach()
        if self._draft is not None:
            self._draft.detach()

    @verb
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- for subclasses -----------------------------------------------------------------------------------------------

    def _weights_may_have_changed(self) -> None:
        """Drop what was derived from the weights; called when the prefix cache is reset."""

    def _check_weights(self) -> None:
        """Warn once of weights that were changed without a word; called when the engine was idle."""
        if self.model.weights_version() != self._weights_version:
            self._weights_version = None
            _log.warning(
                "the weights of %s were changed, and weights_changed() was not called: cached prefixes and what was "
                "made of the old weights are still used; call it after each change of the weights",
                self.model.description.name,
            )

    @verb
    def _set_listener(self, listener: CacheListener | None) -> None:
        if listener is not None and not callable(listener):
            raise RequestError(f"on_cache_events must be a callable or None, not {shown(listener)}", code="bad_params")
        self._settle()
        self._cache_events.listen(listener)

    def _new_id(self, request_id: str | None) -> str:
        """Return ``request_id``, or a fresh id for None; raise ``RequestError`` if it is in use or not an id."""
        if request_id is None:
            return self._requests.fresh_id()
        if self._requests.samples_of(_checked_id(request_id)):
            raise RequestError(f"a request {shown(request_id)} is in the engine already", code="duplicate_id")
        return request_id

    def _add(self, requests: Sequence[RequestT]) -> None:
        if self._weights_version is not None and not self.has_unfinished:
            self._check_weights()
        for request in requests:
            self._requests.add(request)
            self._scheduler.add(request)

    def _serve(
        self,
        num_requests: int,
        add: Callable[[int], Sequence[RequestT]],
        on_progress: Callable[[int], object] | None,
    ) -> list[Sequence[RequestT] | KVFrameError]:
        """Serve a batch of requests to their ends.

        Args:
            num_requests: The number of requests.
            add: Adds the request at an index of the batch and returns all its samples. It raises ``RequestError`` for a
                refused request, or ``ModelError`` if the model cannot serve it.
            on_progress: Called after each step with the number of finished requests, refused ones included. If it
                returns False, unfinished requests end as aborted.

        Returns:
            For each index, the samples of its request, or the error that refused it.

        Raises:
            RequestError: ``on_progress`` is not callable (``bad_params``); or every request is refused, with the error
                of the first one.
            ModelError: Every request is refused, and the model cannot serve one of them.
        """
        if on_progress is not None and not callable(on_progress):
            raise RequestError(f"on_progress must be a callable or None, not {shown(on_progress)}", code="bad_params")
        added: dict[int, Sequence[RequestT]] = {}
        refused: dict[int, KVFrameError] = {}
        try:
            for index in range(num_requests):
                try:
                    added[index] = add(index)
                except (RequestError, ModelError) as error:
                    refused[index] = error
            if refused and not added:
                raise next((error for error in refused.values() if isinstance(error, ModelError)), refused[0])
            pending = list(added.values())
            while pending:
                self._advance()
                pending = [samples for samples in pending if any(request.finish_reason is None for request in samples)]
                if on_progress is not None:
                    with self._turns.let_through():
                        goes_on = on_progress(num_requests - len(pending))
                    if goes_on is False:
                        break
        finally:
            for samples in added.values():
                self._forget(samples)
        return [added[index] if index in added else refused[index] for index in range(num_requests)]

    def _advance(self) -> None:
        """Compute one batch and record the requests that have something to report."""
        self._step_began = monotonic()
        try:
            self._compute_batch()
        finally:
            self._step_began = 0.0
            if self._scheduler.failed:
                self._requests.note(self._scheduler.take_failed())

    def _compute_batch(self) -> None:
        if self._pipeline is not None:
            self._compute_overlapped(self._pipeline)
            return
        step = self._choose_step()
        if step is None:
            return
        try:
            with self._turns.let_through():
                outcomes = self._runner.run(step)
        except BaseException as error:
            self._note_failed_step(self._scheduler.fail(step, STEP_FAILED), error)
            raise
        self._note_completed(step, self._scheduler.complete(step, outcomes))

    def _choose_step(self) -> ScheduledStep[RequestT] | None:
        """Choose the next step; if there is none, wait shortly for pages that are fetched."""
        step = self._scheduler.schedule()
        if step is None:
            if self._tiers is not None:
                self._tiers.wait()
        elif self._trace is not None:
            self._trace.note_scheduled(step, "" if self._pipeline is None else self._pipeline.waits_for)
        return step

    def _note_failed_step(self, failed: Sequence[RequestT], error: BaseException) -> None:
        """Record the requests that a failed step ended; the caller raises the exception."""
        self._turns.hold()
        self._requests.note(failed)
        if self.is_closed:
            self._end_all(RANKS_ENDED)
        refuse_exit(f"{self.model.description.name}: a step failed", error)

    def _note_completed(self, step: ScheduledStep[RequestT], completed: Sequence[RequestT]) -> None:
        """Record the requests that a step gave something to report."""
        self._requests.unreported.update({request.request_id: request for request in completed})
        if self._trace is not None or self._tiers is not None or self._cache_events.is_needed:
            self._report_step(step)

    def _compute_overlapped(self, pipeline: StepPipeline[RequestT]) -> None:
        """Launch the step after the one that the device computes, if it can be chosen, and complete that one."""
        try:
            if not pipeline.has_step:
                step = self._choose_step()
                if step is None:
                    return
                pipeline.launch(step)
            following = pipeline.choose_next()
            if following is not None:
                if self._trace is not None:
                    self._trace.note_scheduled(following)
                pipeline.launch(following)
            with self._turns.let_through():
                pipeline.wait()
            self._note_completed(*pipeline.complete())
            # If the engine was closed because its ranks have ended, no later call completes the second step.
            if pipeline.is_unneeded or (self.is_closed and pipeline.has_step):
                self._note_completed(*pipeline.complete())
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not pipeline.is_failed_by(error):
                self._turns.hold()  # only the wait was interrupted: the next call completes the steps
                raise
            self._note_failed_step(pipeline.fail(STEP_FAILED), error)
            raise

    def _end_unneeded_step(self) -> None:
        """Wait for the step on the device if all its requests have ended: no later call would complete it."""
        if self._pipeline is not None and self._pipeline.is_unneeded:
            self._pipeline.fail(STEP_FAILED)

    def _settle(self) -> None:
        """Complete the steps that the device still computes."""
        pipeline = self._pipeline
        if pipeline is None or not pipeline.has_step:
            return
        try:
            while pipeline.has_step:
                self._note_completed(*pipeline.complete())
        except BaseException as error:
            self._requests.note(pipeline.fail(STEP_FAILED))
            refuse_exit(f"{self.model.description.name}: a step failed", error)
            raise

    def _report_step(self, step: ScheduledStep[RequestT]) -> None:
        """Record a computed step; give the pages that it made findable to page stores, and its events to listeners."""
        if self._trace is not None:
            self._trace.note_computed(step)
        if self._tiers is not None:
            is_last = not self._scheduler.has_work
            self._tiers.after_step(step.num_tokens, monotonic() - self._step_began, is_last=is_last)
        self._cache_events.deliver()

    def _before_end(self) -> None:
        """Call the listener before this process ends because another rank failed."""
        if self.on_failed_rank is not None:
            self.on_failed_rank()

    def _end_all(self, error: str) -> None:
        """End every request with an error, after the engine was closed in a step."""
        for request in self._requests.values():
            if request.finish_reason is None:
                request.error = error
                self._scheduler.end(request, "error")

    def _forget(self, requests: Iterable[RequestT]) -> None:
        """End requests without a report to their owner."""
        for request in requests:
            if self._requests.holds(request):
                self._requests.remove(request.request_id)
            self._scheduler.end(request, "aborted")
        self._end_unneeded_step()


def _checked_id(request_id: object) -> str:
    """Return a request's id; raises ``RequestError`` if it is none."""
    if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_ID_CHARS:
        raise RequestError(
            f"a request's id is a string of 1 to {MAX_ID_CHARS:,} characters, not {shown(request_id)}", code="bad_id"
        )
    return request_id
