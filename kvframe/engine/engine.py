"""The engine: a model, its paged cache and a queue of requests behind a few verbs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType

from kvframe.attention.selection import Choice
from kvframe.cache.manager import KVCacheManager
from kvframe.engine.admission import Admission, refused_output
from kvframe.engine.assembly import assemble, load_model
from kvframe.engine.request import Request, RequestOutput, SamplingParams
from kvframe.engine.request_table import RequestTable
from kvframe.engine.runner import ModelRunner, SkipPolicy
from kvframe.engine.scheduler import Scheduler
from kvframe.engine.self_check import run_packed
from kvframe.engine.stats import EngineStats
from kvframe.engine.text import TextStream
from kvframe.errors import RequestError
from kvframe.groups import Grouping
from kvframe.model.adapter import LoadedModel
from kvframe.plan import KVCachePlan
from kvframe.registry import Registry
from kvframe.specs import LayerSpec
from kvframe.stack import Stack


class Engine:
    """Serves requests with one model.

    Requests are added at any time; each ``step`` computes one batch of them. An exception of the model ends the
    requests of that step (``finish_reason="error"``), gives their blocks back, and goes on to the caller; the engine
    can go on with the other requests. Not safe to use from several threads at once.

    Where the stack's ``prefill_skipping`` is on, a ``skip_policy`` is asked in each step in which tokens could be
    skipped, and says of it (a ``StepBatch``) whether they are. Its exceptions end the step as the model's do. To skip
    in long steps only::

        Engine.from_pretrained(path, stack=stack, skip_policy=lambda batch: batch.query_lens.sum() >= 256)

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
            ModelError: The model cannot be attached, or computes something else than it does by itself.
        """
        self.model = model
        self.stack = stack = Stack() if stack is None else stack
        assembly = assemble(model, layers, stack, registry)
        self.grouping: Grouping = assembly.grouping
        self.plan: KVCachePlan = assembly.plan
        self.choices: tuple[Choice, ...] = assembly.choices
        self._storage = assembly.storage
        self._max_model_len = assembly.max_model_len
        self._admission = Admission(model, self.plan, self._max_model_len)
        max_num_seqs = stack.engine.max_num_seqs
        self._manager = KVCacheManager(
            self.plan,
            max_num_seqs=max_num_seqs,
            prefix_caching=stack.cache.prefix_caching,
            host_pages=assembly.host,
        )
        if poison_freed:
            self._storage.poison()
            self._manager.on_pages_freed = lambda group, block_ids: self._storage.fill(group, block_ids, math.nan)
        self._scheduler = Scheduler(
            self._manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=stack.engine.max_num_batched_tokens,
            shared_block_size=(
                math.lcm(*(group.block_size for group in self.plan.groups)) if self._manager.prefix_caching else 0
            ),
        )
        self._runner = ModelRunner(
            model,
            assembly.layers,
            self._manager.tables,
            assembly.device,
            max_num_seqs=max_num_seqs,
            max_model_len=self._max_model_len,
            skip_policy=skip_policy,
        )
        self._requests = RequestTable()
        model.attach(assembly.layers)
        try:
            if stack.engine.self_check:
                model.self_check(partial(run_packed, assembly))
        except BaseException:
            model.detach()
            raise

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        stack: Stack | None = None,
        plugins: Sequence[ModuleType] = (),
        poison_freed: bool = False,
        skip_policy: SkipPolicy | None = None,
    ) -> Engine:
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

    def add_request(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a request and return its id.

        Args:
            prompt: Text, or token ids.
            params: How to sample and when to stop; greedy, 64 tokens unless given.
            request_id: Its id; a fresh one unless given.

        Raises:
            RequestError: The request can never be served; ``code`` is one of ``empty_prompt``, ``prompt_too_long``,
                ``bad_token``, ``bad_text``, ``too_large``, ``no_tokenizer``, ``duplicate_id``. Others are not touched.
            ModelError: The prompt is text, and the model has no tokenizer.
        """
        params = SamplingParams() if params is None else params
        if request_id is None:
            request_id = self._requests.fresh_id()
        elif request_id in self._requests:
            raise RequestError(f"a request {request_id!r} is in the engine already", code="duplicate_id")
        token_ids = self._admission.token_ids(prompt, params)
        stream = TextStream(self._decode, token_ids, params.stop) if self._admission.has_text else None
        request = Request.create(
            request_id,
            token_ids,
            params,
            eos_token_ids=self.model.description.eos_token_ids,
            max_model_len=self._max_model_len,
            text_stream=stream,
        )
        self._requests.add(request)
        self._scheduler.add(request)
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request now and give its blocks back; its last output comes with the next ``step``.

        Args:
            request_id: The request; one that has ended, or is not known, is passed over.
        """
        request = self._requests.get(request_id)
        if request is not None and request.finish_reason is None:
            self._scheduler.end(request, "aborted")
            self._requests.note([request])

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has something to do or to report."""
        return self._scheduler.has_work or bool(self._requests.with_news)

    def step(self) -> list[RequestOutput]:
        """Compute one batch.

        Returns:
            The requests with new tokens or an end, each with what is new; empty if a step only computed parts of
            prompts, or if there is nothing to do.
        """
        self._advance()
        return [self._requests.report(request_id) for request_id in self._requests.with_news]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Serve one request and yield its outputs as they come; the last one has a ``finish_reason``.

        Other requests go on meanwhile, and what they produce is kept for ``step``; a ``step`` while the stream is
        open reports what the stream has not yielded yet. Leaving the iteration early aborts the request.

        Args:
            prompt: Text, or token ids.
            params: How to sample and when to stop.

        Raises:
            RequestError: At once, as ``add_request``.
        """
        return self._stream(self.add_request(prompt, params))

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[RequestOutput]:
        """Serve a batch of requests to their ends.

        Args:
            prompts: Texts or token ids.
            params: For all, or one for each.
            on_progress: Called after each step with the number of prompts that are done, refused ones included.

        Returns:
            One output for each prompt, in order; a refused one has ``finish_reason="refused"`` and an ``error``.
        """
        if isinstance(params, SamplingParams) or params is None:
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts have {len(params)} params", code="bad_params")
        request_ids: list[str | None] = []
        outputs: dict[int, RequestOutput] = {}
        try:
            for index, prompt in enumerate(prompts):
                try:
                    request_ids.append(self.add_request(prompt, params[index]))
                except RequestError as error:
                    request_ids.append(None)
                    outputs[index] = refused_output(index, prompt, error)
            pending = [self._requests[request_id] for request_id in request_ids if request_id is not None]
            while pending:
                self._advance()
                pending = [request for request in pending if request.finish_reason is None]
                if on_progress is not None:
                    on_progress(len(prompts) - len(pending))
            for index, request_id in enumerate(request_ids):
                if request_id is not None:
                    outputs[index] = self._requests.report(request_id)
        finally:
            # Only where an exception cut it short is anything left.
            for request_id in filter(None, request_ids):
                self._forget(request_id)
        return [outputs[index] for index in range(len(prompts))]

    def stats(self) -> EngineStats:
        """Return what the engine did so far."""
        return EngineStats.of(self._scheduler.stats, self._manager.stats, self._storage.pool.numel())

    def reset_prefix_cache(self) -> None:
        """Give up every cached prefix; running requests are not touched."""
        self._manager.reset_prefix_cache()

    def close(self) -> None:
        """End every request and leave the model as it was. Safe to call twice."""
        for request_id in list(self._requests):
            self._forget(request_id)
        self.model.detach()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Compute one batch and note who has something new."""
        step = self._scheduler.schedule()
        if step is None:
            return
        try:
            token_ids = self._runner.run(step)
        except BaseException as error:
            failed = self._scheduler.fail(step, f"the step failed: {type(error).__name__}: {error}")
            self._requests.note(failed)
            raise
        self._requests.note(self._scheduler.complete(step, token_ids))

    def _stream(self, request_id: str) -> Iterator[RequestOutput]:
        try:
            while request_id in self._requests:
                if request_id not in self._requests.with_news:
                    self._advance()
                if request_id in self._requests.with_news:
                    yield self._requests.report(request_id)
        finally:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        """End a request that its owner gave up, without a report."""
        request = self._requests.remove(request_id)
        if request is not None:
            self._scheduler.end(request, "aborted")

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.model.decode(token_ids) or ""
