"""The engine: a model, its paged cache and a queue of requests behind a few verbs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import attrs
import numpy as np
import torch

from kvframe.attention.layer import AttentionLayers
from kvframe.attention.selection import Choice, select_backends
from kvframe.cache.manager import KVCacheManager
from kvframe.cache.storage import KVCacheStorage
from kvframe.engine.request import Request, RequestOutput, SamplingParams
from kvframe.engine.runner import ModelRunner
from kvframe.engine.scheduler import Scheduler
from kvframe.engine.text import TextStream
from kvframe.errors import PlanError, RequestError, StackError
from kvframe.groups import Grouping, group_layers, make_layer_specs
from kvframe.model.adapter import LoadedModel
from kvframe.model.recognise import find_adapter
from kvframe.plan import KVCachePlan
from kvframe.plugins import load_plugins
from kvframe.registry import Registry
from kvframe.sizing import choose_max_model_len, plan_for_stack
from kvframe.specs import LayerSpec
from kvframe.stack import Stack


@attrs.frozen(kw_only=True)
class EngineStats:
    """What an engine did so far, and what its cache holds.

    Attributes:
        prompt_tokens: Prompt tokens of the requests that were admitted.
        cached_prompt_tokens: Of these, the tokens that a cached prefix covered.
        prefix_hit_rate: Their share; 0 before the first request.
        computed_tokens: Tokens computed, again after a preemption included.
        generated_tokens: Tokens generated.
        preemptions: Times that a running request gave its blocks back.
        steps: Steps completed.
        blocks_held: Per group, the blocks that requests hold now.
        peak_blocks_held: Per group, the most blocks held at once.
        peak_bytes_held: The most bytes of blocks of all groups held at once.
        evictions: Cached blocks whose content was given up.
        cache_bytes: Bytes allocated for the cache.
    """

    prompt_tokens: int
    cached_prompt_tokens: int
    prefix_hit_rate: float
    computed_tokens: int
    generated_tokens: int
    preemptions: int
    steps: int
    blocks_held: tuple[int, ...]
    peak_blocks_held: tuple[int, ...]
    peak_bytes_held: int
    evictions: int
    cache_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain values, ready for JSON."""
        return attrs.asdict(self)


class Engine:
    """Serves requests with one model.

    Requests are added at any time; each ``step`` computes one batch of them. An exception of the model ends the
    requests of that step (``finish_reason="error"``), gives their blocks back, and goes on to the caller; the engine
    can go on with the other requests. Not safe to use from several threads at once.

    Attributes:
        model: The model.
        stack: The stack that was asked for.
        grouping: The cache groups.
        plan: What is allocated.
        choices: For each layer, the backend that was chosen and why the others were not.
    """

    def __init__(
        self,
        model: LoadedModel,
        layers: Sequence[LayerSpec],
        *,
        registry: Registry,
        stack: Stack | None = None,
        poison_freed: bool = False,
    ) -> None:
        """Plan and allocate the cache, choose backends, and attach the model.

        Args:
            model: A loaded model, not attached.
            layers: Its layer specs, as ``make_layer_specs`` returns them.
            registry: Where backends and wrappers are looked up.
            stack: Memory, limits and rules; the defaults unless given.
            poison_freed: Fill pages with NaN when their content ends, so that a read of state that should be gone
                shows. For tests.

        Raises:
            StackError: The stack asks for longer requests than the model takes.
            PlanError: The memory is too small.
            BackendError: No backend serves a layer, or the one that was named cannot.
            ModelError: The model cannot be attached, or computes something else than it does by itself.
        """
        self.model = model
        self.stack = stack = Stack() if stack is None else stack
        self._device = device = torch.device(stack.engine.device)
        self._max_model_len = choose_max_model_len(model.description, stack)
        self.grouping: Grouping = group_layers(layers, hybrid=stack.cache.hybrid)
        self.plan: KVCachePlan = plan_for_stack(self.grouping, stack, self._max_model_len)
        self.choices: tuple[Choice, ...] = select_backends(layers, stack, registry, device.type)
        self._storage = KVCacheStorage(self.plan, self.grouping, device)
        self._layers = AttentionLayers(layers, self.choices, self.grouping, self._storage.views, device)
        max_num_seqs = stack.engine.max_num_seqs
        self._manager = KVCacheManager(self.plan, max_num_seqs=max_num_seqs, prefix_caching=stack.cache.prefix_caching)
        if poison_freed:
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
            self._layers,
            self._manager.tables,
            device,
            max_num_seqs=max_num_seqs,
            max_model_len=self._max_model_len,
        )
        self._requests: dict[str, Request] = {}
        self._unreported: dict[str, Request] = {}
        self._next_id = itertools.count()
        self._has_text = model.decode([]) is not None
        model.attach(self._layers)
        try:
            if stack.engine.self_check:
                model.self_check(self._run_packed)
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
    ) -> Engine:
        """Load a model from disk and make an engine for it: the whole flow.

        Args:
            path: A model's folder, of a kind that an installed plugin recognises.
            stack: What to use; the defaults unless given.
            plugins: Manifest modules to use beside the installed plugins.
            poison_freed: As for the constructor.

        Raises:
            KVFrameError: What is wrong with the stack, a plugin it names, the model or the memory.
        """
        stack = Stack() if stack is None else stack
        registry = load_plugins(stack.plugins, plugins).registry
        stack.check_names(registry)
        _check_device(stack)
        path = Path(path)
        model = find_adapter(path, registry).load(path, device=stack.engine.device, dtype=stack.engine.dtype)
        layers = make_layer_specs(model.description, registry, stack, stack.engine.dtype)
        return cls(model, layers, registry=registry, stack=stack, poison_freed=poison_freed)

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
            request_id = next(name for name in map("req-{}".format, self._next_id) if name not in self._requests)
        elif request_id in self._requests:
            raise RequestError(f"a request {request_id!r} is in the engine already", code="duplicate_id")
        token_ids = self._checked_token_ids(prompt, params)
        stream = TextStream(self._decode, token_ids, params.stop) if self._has_text else None
        request = Request.create(
            request_id,
            token_ids,
            params,
            eos_token_ids=self.model.description.eos_token_ids,
            max_model_len=self._max_model_len,
            text_stream=stream,
        )
        self._requests[request_id] = request
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
            self._unreported[request_id] = request

    @property
    def has_unfinished(self) -> bool:
        """Whether ``step`` has something to do or to report."""
        return self._scheduler.has_work or bool(self._unreported)

    def step(self) -> list[RequestOutput]:
        """Compute one batch.

        Returns:
            The requests with new tokens or an end, each with what is new; empty if a step only computed parts of
            prompts, or if there is nothing to do.
        """
        self._advance()
        reported = list(self._unreported)
        return [self._report(request_id) for request_id in reported]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Serve one request and yield its outputs as they come; the last one has a ``finish_reason``.

        Other requests go on meanwhile, and what they produce is kept for ``step``. Leaving the iteration early
        aborts the request.

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
            on_progress: Called after each step with the number of these requests that have ended.

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
                    outputs[index] = _refused(index, prompt, error)
            mine = [self._requests[request_id] for request_id in request_ids if request_id is not None]
            while (num_ended := sum(request.finish_reason is not None for request in mine)) < len(mine):
                self._advance()
                if on_progress is not None:
                    on_progress(num_ended)
            for index, request_id in enumerate(request_ids):
                if request_id is not None:
                    outputs[index] = self._report(request_id)
        finally:
            # Only where an exception cut it short is anything left.
            for request_id in request_ids:
                self._forget(request_id)
        return [outputs[index] for index in range(len(prompts))]

    def stats(self) -> EngineStats:
        """Return what the engine did so far."""
        scheduled, cached = self._scheduler.stats, self._manager.stats
        return EngineStats(
            prompt_tokens=scheduled.prompt_tokens,
            cached_prompt_tokens=scheduled.cached_prompt_tokens,
            prefix_hit_rate=scheduled.cached_prompt_tokens / max(1, scheduled.prompt_tokens),
            computed_tokens=scheduled.computed_tokens,
            generated_tokens=scheduled.generated_tokens,
            preemptions=scheduled.preemptions,
            steps=scheduled.steps,
            blocks_held=tuple(cached.blocks_held),
            peak_blocks_held=tuple(cached.peak_blocks_held),
            peak_bytes_held=cached.peak_bytes_held,
            evictions=cached.num_evictions,
            cache_bytes=self._storage.pool.numel(),
        )

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
            failed = self._scheduler.fail(step, f"the model failed: {type(error).__name__}: {error}")
            self._unreported.update((request.request_id, request) for request in failed)
            raise
        for request in self._scheduler.complete(step, token_ids):
            self._unreported[request.request_id] = request

    def _report(self, request_id: str) -> RequestOutput:
        self._unreported.pop(request_id, None)
        output = self._requests[request_id].report()
        if output.finish_reason is not None:
            del self._requests[request_id]
        return output

    def _stream(self, request_id: str) -> Iterator[RequestOutput]:
        try:
            while request_id in self._requests:
                if request_id not in self._unreported:
                    self._advance()
                if request_id in self._unreported:
                    yield self._report(request_id)
        finally:
            self._forget(request_id)

    def _forget(self, request_id: str | None) -> None:
        """End a request that its owner gave up, without a report."""
        request = self._requests.pop(request_id, None) if request_id is not None else None
        if request is not None:
            self._scheduler.end(request, "aborted")
            self._unreported.pop(request.request_id, None)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.model.decode(token_ids) or ""

    def _checked_token_ids(self, prompt: str | Sequence[int], params: SamplingParams) -> list[int]:
        """Return the prompt's token ids; raises ``RequestError`` if the request can never be served."""
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"the prompt is not Unicode text: {error.reason}", code="bad_text") from error
            token_ids = self.model.encode(prompt)
        else:
            token_ids = _whole_numbers(prompt)
        vocab_size = self.model.description.vocab_size
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token", code="empty_prompt")
        if len(token_ids) >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, but a request has at most {self._max_model_len}, "
                "at least one of them generated",
                code="prompt_too_long",
            )
        if min(token_ids) < 0 or (vocab_size is not None and max(token_ids) >= vocab_size):
            wrong = next(token for token in token_ids if token < 0 or (vocab_size is not None and token >= vocab_size))
            raise RequestError(f"{wrong} is no token id; the model has [0, {vocab_size})", code="bad_token")
        if params.stop and not self._has_text:
            raise RequestError(
                f"{self.model.description.name} has no tokenizer, so no stop string can be found; use stop_token_ids",
                code="no_tokenizer",
            )
        num_tokens = min(len(token_ids) + params.max_new_tokens, self._max_model_len)
        if not self.plan.fits(num_tokens):
            raise RequestError(
                f"a request of {num_tokens} tokens does not fit the cache of {self.plan.total_bytes} bytes, even "
                "alone; give more memory or ask for fewer tokens",
                code="too_large",
            )
        return token_ids

    def _run_packed(self, prompts: list[list[int]]) -> list[torch.Tensor]:
        """Return the logits ``[len(prompt), vocab_size]`` of each prompt, as many in one batch as the pool holds.

        Uses a request table of its own, so that it leaves no trace in the engine's.
        """
        manager = KVCacheManager(self.plan, max_num_seqs=len(prompts), prefix_caching=False)
        runner = ModelRunner(
            self.model,
            self._layers,
            manager.tables,
            self._device,
            max_num_seqs=len(prompts),
            max_model_len=self._max_model_len,
        )
        logits: list[torch.Tensor] = []
        waiting = [prompt[: self._max_model_len] for prompt in prompts]
        while waiting:
            batch: list[list[int]] = []
            for prompt in waiting:
                request_id = str(len(batch))
                manager.start(request_id, prompt)
                if not manager.extend(request_id, len(prompt)):
                    manager.free(request_id)
                    break
                runner.tokens[manager.row(request_id), : len(prompt)] = prompt
                batch.append(prompt)
            if not batch:
                raise PlanError(
                    f"{self.plan.total_bytes} bytes of cache do not hold the {len(waiting[0])} tokens of the "
                    "self-check; give more memory, or set self_check = false in the stack's [engine]"
                )
            lens = [len(prompt) for prompt in batch]
            rows = np.array([manager.row(str(index)) for index in range(len(batch))], dtype=np.int64)
            packed = runner.forward(
                rows, np.zeros(len(batch), dtype=np.int64), np.array(lens, dtype=np.int64), np.arange(sum(lens))
            )
            logits.extend(packed.split(lens))
            for index in range(len(batch)):
                manager.free(str(index))
            del waiting[: len(batch)]
        return logits


def _check_device(stack: Stack) -> None:
    """Refuse a device that is not there before a model is loaded for it."""
    try:
        torch.empty(0, device=stack.engine.device)
    except (RuntimeError, AssertionError) as error:  # a build of torch without the device asserts
        reason = str(error).strip().splitlines()[0]
        raise StackError(f"{stack.source}: engine.device {stack.engine.device!r} cannot be used: {reason}") from error


def _whole_numbers(prompt: Sequence[int]) -> list[int]:
    token_ids = [int(token) for token in prompt if isinstance(token, int | np.integer) and not isinstance(token, bool)]
    if len(token_ids) != len(prompt):
        raise RequestError("a prompt is text, or a sequence of whole numbers", code="bad_token")
    return token_ids


def _refused(index: int, prompt: str | Sequence[int], error: RequestError) -> RequestOutput:
    return RequestOutput(
        request_id=f"refused-{index}",
        prompt_token_ids=() if isinstance(prompt, str) or error.code == "bad_token" else tuple(prompt),
        finish_reason="refused",
        error=str(error),
    )
