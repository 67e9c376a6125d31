"""The engine: it continues prompts with a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import attrs

from kvframe import Hints, Pin
from kvframe.contract.errors import KVFrameError, ModelError, RequestError, StackError, shown
from kvframe.contract.model import PredictionHeads
from kvframe_engine.assembly import Assembly
from kvframe_engine.contract.errors import PrefixFileError
from kvframe_engine.core import EngineCore
from kvframe_engine.graphs.sizes import Generating, UsualStep
from kvframe_engine.graphs.step_graphs import Forward, StepGraphs
from kvframe_engine.pipeline import StepPipeline
from kvframe_engine.prefixes.fingerprint import fingerprint_of
from kvframe_engine.prefixes.of_prompts import PromptPrefixes
from kvframe_engine.prefixes.saved import PrefixFiles, SavedPrefix, checked_path
from kvframe_engine.ranks.leader import Leader, LeadingTokens
from kvframe_engine.requests.admission import MAX_VOCAB_SIZE, check_token_ids, checked_params, checked_sender
from kvframe_engine.requests.output import RequestOutput
from kvframe_engine.requests.params import SamplingParams
from kvframe_engine.requests.processors import Processors, Started
from kvframe_engine.requests.prompt import (
    AnyPrompt,
    hints_of_each,
    owner_of_each,
    params_for_each,
    prompts_of,
    salt_of_each,
)
from kvframe_engine.requests.request import Request, other_samples
from kvframe_engine.requests.stops import NO_STOPS, StopStrings
from kvframe_engine.requests.text import TextStream
from kvframe_engine.running.draft_runner import DraftRunner
from kvframe_engine.running.heads_runner import HeadsRunner
from kvframe_engine.running.launched_steps import LastTokens
from kvframe_engine.running.model_runner import ModelRunner, SkipPolicy, TokenRunner, forward_of
from kvframe_engine.streaming import RequestStream
from kvframe_engine.turns import verb


class Engine(EngineCore[Request]):
    """Continues prompts with one model.

    Requests can be added at any time; each ``step`` computes one batch of them. If the model or a plugin raises, or
    Ctrl-C interrupts a step, the requests of that step end (``finish_reason="error"``), their blocks are freed, and the
    exception is raised to the caller; the engine can continue with the other requests. If the output for one request is
    not numbers, or its tokens cannot be turned into text, only that request ends. If it started on a cached prefix, it
    is first computed again without the prefix.

    An engine serves one call at a time. A verb that is called while another one runs, by another thread or by a
    callback, raises ``EngineError`` (``busy``) and changes nothing. After ``close``, every verb but ``close`` raises
    ``EngineError`` (``closed``). ``stats`` and ``default_params`` always answer. Ctrl-C is raised while a step
    computes, a prompt is read, or a callback runs. At any other time it waits until the engine's state is consistent,
    and the result of the interrupted verb is undone: a request that was being added is not in the engine, and an output
    comes with the next ``step``.

    If the stack's ``prefill_skipping`` is on, the ``skip_policy`` is called with a ``StepBatch`` in each step in which
    tokens could be skipped, and returns whether they are. Its exceptions end the step as the model's do. To skip in
    long steps only::

        Engine.from_pretrained(path, stack=stack, skip_policy=lambda batch: batch.query_lens.sum() >= 256)

    Attributes:
        model: The model.
        stack: The stack that was asked for.
        setup: What the stack does with the model.
        grouping: Its cache groups.
        plan: The cache plan.
        choices: For each layer, its wrapper chain, the chosen backend, and why the other backends were not chosen.
    """

    def default_params(self, **named: Any) -> SamplingParams:
        """Return the parameters that the checkpoint asks for, as its generation config says.

        A request that is added without parameters gets them. They are greedy and 64 tokens if the checkpoint does not
        say otherwise.

        Args:
            named: Parameters of ``SamplingParams`` that replace the checkpoint's.

        Raises:
            RequestError: A value is wrong (``bad_params``).
        """
        return SamplingParams(**{**self.model.description.sampling, **named})

    @verb
    def add_request(
        self,
        prompt: AnyPrompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        owner: str = "",
        hints: Hints | None = None,
    ) -> str:
        """Queue a request and return its id.

        Args:
            prompt: Text, or token ids. For a model with an encoder: the encoder's input, or a ``Prompt`` of two parts.
            params: How to sample and when to stop; ``default_params()`` unless given.
            request_id: Its id; a fresh one unless given.
            cache_salt: The request shares cached prefixes and inputs with requests of the same salt only. The salt is,
                for example, the name of a tenant or of a session.
            owner: Whose request it is, for example the name of a tenant. Owners share the engine equally, however many
                requests each has.
            hints: How urgent it is, and for how long its prefix will be needed; no hints unless given. They change no
                token.

        Raises:
            RequestError: The request can never be served; ``code`` is one of ``empty_prompt``, ``prompt_too_long``,
                ``bad_token``, ``bad_text``, ``bad_params``, ``bad_salt``, ``bad_owner``, ``bad_hints``, ``bad_id``,
                ``too_large``, ``no_tokenizer``, ``duplicate_id``, and for the input of an encoder ``missing_input``,
                ``extra_input``, ``bad_input``, ``input_too_long``. Other requests are unchanged.
            ModelError: The prompt is text, and the model has no tokenizer.
        """
        requests = self._add_samples(prompt, params, request_id, cache_salt, owner, hints)
        self._turns.if_lost(lambda: self._forget(requests))
        return requests[0].request_id

    @verb
    def step(self) -> list[RequestOutput]:
        """Compute one batch.

        Returns:
            The requests that have new tokens or ended, each with its new output; empty if the step only computed parts
            of prompts, or if there was nothing to do.
        """
        reported: list[tuple[Request, RequestOutput]] = []
        self._turns.if_lost(lambda: self._take_back(reported))
        self._advance()
        unreported = self._requests.unreported
        for request in unreported.values():
            reported.append((request, self._report(request)))
        unreported.clear()
        for request, output in reported:
            if output.finish_reason is not None:
                self._requests.remove(request.request_id)
        return [output for _, output in reported]

    @verb
    def stream(
        self,
        prompt: AnyPrompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        owner: str = "",
        hints: Hints | None = None,
    ) -> RequestStream:
        """Serve one request and yield its outputs as they come; the last one of each sample has a ``finish_reason``.

        Other requests continue meanwhile, and their outputs are kept for ``step``. A ``step`` while the stream is open
        also reports outputs that the stream has not yielded yet. The request is added at once. It ends when the stream
        is closed or deleted, even before its first output.

        Args:
            prompt: As for ``add_request``.
            params: How to sample and when to stop.
            cache_salt: As for ``add_request``.
            owner: As for ``add_request``.
            hints: As for ``add_request``.

        Raises:
            RequestError: As for ``add_request``, when ``stream`` is called.
        """
        requests = self._add_samples(prompt, params, None, cache_salt, owner, hints)
        self._turns.if_lost(lambda: self._forget(requests))
        return RequestStream(self._turns, partial(self._next_of, requests), partial(self._forget, requests))

    @verb
    def generate(
        self,
        prompts: Sequence[AnyPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | Sequence[str] = "",
        owner: str | Sequence[str] = "",
        hints: Hints | Sequence[Hints | None] | None = None,
        on_progress: Callable[[int], object] | None = None,
    ) -> list[RequestOutput]:
        """Serve a batch of requests to their ends.

        Args:
            prompts: As for ``add_request``.
            params: One for all prompts, or one for each.
            cache_salt: As for ``add_request``: one for all prompts, or one for each.
            owner: As for ``add_request``: one for all prompts, or one for each.
            hints: As for ``add_request``: one value for all prompts, or one for each.
            on_progress: Called after each step with the number of finished prompts, refused ones included. It may call
                ``stats``, and no verb of the engine; an exception that it raises ends the batch. If it returns False,
                the batch ends: the outputs of unfinished prompts hold what was generated (``finish_reason="aborted"``).

        Returns:
            One output for each prompt, in order. If some prompts are refused and others served, a refused one has
            ``finish_reason="refused"`` and an ``error``. If the params ask for ``n`` samples, a prompt has ``n``
            outputs; a prompt whose ``n`` is refused has one.

        Raises:
            RequestError: An argument is not valid for a batch (``bad_prompts``, ``bad_params``, ``bad_salt``,
                ``bad_owner``, ``bad_hints``); or every prompt is refused, with the error of the first one, as
                ``add_request`` and ``stream`` raise it.
            ModelError: Every prompt is refused, and one is text, but the model has no tokenizer.
        """
        with self._turns.let_through():
            prompts = prompts_of(prompts)
            params = params_for_each(params, len(prompts))
            salts = salt_of_each(cache_salt, len(prompts))
            owners = owner_of_each(owner, len(prompts))
            all_hints = hints_of_each(hints, len(prompts))
        ended_requests = self._serve(
            len(prompts),
            lambda index: self._add_samples(
                prompts[index], params[index], None, salts[index], owners[index], all_hints[index]
            ),
            on_progress,
        )
        outputs = []
        for index, samples in enumerate(ended_requests):
            if isinstance(samples, KVFrameError):
                refused = self._refused_output(index, prompts[index], samples)
                outputs += [attrs.evolve(refused, sample=sample) for sample in range(self._num_samples(params[index]))]
            else:
                outputs += [self._report(request) for request in samples]
        return outputs

    # --- pinned and saved prefixes ------------------------------------------------------------------------------------

    @verb
    def pin_prefix(self, prompt: AnyPrompt, *, cache_salt: str = "") -> Pin:
        """Keep a prompt's prefix, such as a system prompt, cached until ``unpin``; compute it if it is not cached.

        The pin keeps the longest prefix of whole blocks, and the prompt's inputs for an encoder. Other requests
        continue while it is computed, and their outputs are kept for ``step``. A reset of the prefix cache ends all
        pins.

        Args:
            prompt: As for ``add_request``.
            cache_salt: As for ``add_request``: requests with the same salt find the prefix.

        Returns:
            The pin; its ``num_tokens`` says how many of the prompt's tokens are kept.

        Raises:
            RequestError: As for ``add_request``; or the prompt has no whole block (``prompt_too_short``), the engine
                has no prefix cache (``no_prefix_caching``), or beside all pins there would be too few blocks for a
                request of the greatest length (``no_capacity``).
            ModelError: As for ``add_request``.
        """
        pin = self._prompt_prefixes.pin(prompt, cache_salt)
        self._turns.if_lost(lambda: self._prompt_prefixes.unpin(pin))
        return pin

    @verb
    def unpin(self, pin: Pin) -> None:
        """Release a pin; its prefix stays cached until it is evicted. A pin that has ended already is ignored.

        Raises:
            RequestError: ``pin`` is not a pin (``bad_pin``).
        """
        if not isinstance(pin, Pin):
            raise RequestError(f"unpin takes what pin_prefix returned, not {shown(pin)}", code="bad_pin")
        self._prompt_prefixes.unpin(pin)

    @verb
    def save_prefixes(
        self, path: str | Path, prompts: Sequence[AnyPrompt], *, cache_salt: str | Sequence[str] = ""
    ) -> list[SavedPrefix]:
        """Write prompts' prefixes to a file, for ``load_prefixes`` in another process; compute those not cached.

        The file holds the longest prefix of whole blocks of each prompt, and its inputs for an encoder. It stores the
        bytes of the pages that a request needs to continue, each page once; the token ids and the salt, in plain; and
        for an encoder's input its key (``kvframe.content_key``). To save such an input, the stack's ``[cache]`` needs a
        ``key``. The engine writes a temporary file in the same folder, and renames it when it is complete.

        Args:
            path: The file; an existing one is replaced.
            prompts: As for ``add_request``, each with a whole block of tokens at least.
            cache_salt: As for ``add_request``: one for all prompts, or one for each.

        Returns:
            For each prompt, its saved prefix.

        Raises:
            RequestError: As for ``pin_prefix``, except ``no_capacity``. Nothing is written.
            PrefixFileError: The file cannot be written (``unwritable``), or the stack has no key for a prompt's input
                for an encoder (``no_key``). An existing file is unchanged.
            ModelError: As for ``add_request``, or the model's adapter does not identify the model.
        """
        with self._turns.let_through():
            prompts = prompts_of(prompts)
        return self._prefix_files.save(checked_path(path, "unwritable"), prompts, cache_salt)

    @verb
    def load_prefixes(self, path: str | Path, *, cache_salt: str | None = None) -> list[SavedPrefix]:
        """Put the prefixes of a file into the cache: requests find them as if this engine had computed them.

        Prefixes are loaded in the file's order, and unused cached blocks are evicted for them. A prefix that does not
        fit beside the earlier ones is left out, and the next one is tried. Loaded prefixes are cached like all others,
        and can be evicted; ``pin_prefix`` keeps them.

        The checksums of the file find damage, not an attack: the engine trusts the states in the file as it trusts the
        model's weights. Only load files from sources from which you would load weights.

        Args:
            path: A file of ``save_prefixes``, of the same model, weights and cache pages.
            cache_salt: The salt of the requests that are to find them; the one that each was saved under unless given.

        Returns:
            For each prefix of the file, its tokens, and whether it is in the cache now.

        Raises:
            PrefixFileError: The file is damaged; or it is of another version, model or kind of pages; or it has inputs,
                and this stack has no key or another one. Nothing was changed.
            RequestError: The engine has no prefix cache (``no_prefix_caching``), ``max_num_seqs`` requests run already
                (``busy``), or the salt is not a salt (``bad_salt``). Nothing was changed.
            ModelError: The model's adapter does not identify the model.
        """
        loaded = self._prefix_files.load(checked_path(path, "unreadable"), cache_salt)
        self._cache_events.deliver()
        return loaded

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_model(self) -> None:
        description, step_local = self.model.description, self.grouping.step_local
        if description.generates and not step_local:
            self._default_params = self._checked_defaults()
            return
        why = f"; its layer {step_local[0]!r} keeps nothing of the tokens before" if step_local else ""
        raise ModelError(
            f"{description.name} does not generate text{why}: it is for embeddings, which `kvframe embed` and "
            "kvframe.Embedder make"
        )

    def _checked_defaults(self) -> SamplingParams:
        try:
            params = self.default_params()
            check_token_ids(params, self.model.description.vocab_size or MAX_VOCAB_SIZE)
        except (RequestError, TypeError) as error:
            raise ModelError(
                f"the sampling parameters of {self.model.description.name} cannot be meant: {error}; correct its "
                "generation_config.json"
            ) from error
        return params

    def _make_runner(self, assembly: Assembly, skip_policy: SkipPolicy | None) -> TokenRunner:
        draft = assembly.draft
        has_heads = draft is not None and isinstance(draft.model, PredictionHeads)
        forward = forward_of(self.model, with_hidden_states=has_heads or self._scheduler.hidden_states is not None)
        last_tokens = None
        if self._overlaps(assembly):
            make_last_tokens = partial(LeadingTokens, self._ranks) if isinstance(self._ranks, Leader) else LastTokens
            last_tokens = make_last_tokens(self.stack.limits.max_num_seqs, assembly.device)
            forward = last_tokens.before(forward)
        max_drafts, usual_steps = self._scheduler.max_drafts, None
        if max_drafts:
            # All logits of a request's drafts are wanted, of few requests or of many.
            steps_of_drafts = [(1 + max_drafts, Generating.ALL), (1 + max_drafts, Generating.FEW)]
            usual_steps = [
                *((query_len, Generating.LAST) for query_len in self.stack.model.graph_query_lens),
                *steps_of_drafts,
            ]
        runner = TokenRunner(
            self.model,
            assembly.layers,
            self._manager.tables,
            assembly.device,
            max_num_seqs=self.stack.limits.max_num_seqs,
            max_model_len=self._max_model_len,
            skip_policy=skip_policy,
            hidden_states=self._scheduler.hidden_states,
            graphs=self._make_graphs(assembly, forward, usual_steps),
            forward=forward,
            keeps_all_rows=has_heads,
        )
        runner.last_tokens = last_tokens
        if draft is not None:
            runner.draft = self._make_draft_runner(draft, runner)
            self._scheduler.use_draft_model(runner.draft.continue_requests)
        return runner

    def _overlaps(self, assembly: Assembly) -> bool:
        """Return whether the next step is chosen while the device computes the last one."""
        overlap = self.stack.engine.overlap
        if not self._scheduler.max_drafts:
            return overlap == "on" or (overlap == "auto" and assembly.device.type != "cpu")
        if overlap == "on":
            raise StackError(
                f'{self.stack.source}: engine.overlap = "on" and model.drafts exclude each other: what a step computes '
                "depends on which drafts of the last one were accepted; remove one of them",
                code="overlap_with_drafts",
            )
        return False

    def _make_pipeline(self) -> StepPipeline[Request] | None:
        assert isinstance(self._runner, TokenRunner)
        if self._runner.last_tokens is None:
            return None
        return StepPipeline(self._scheduler, self._runner)

    def _make_draft_runner(self, draft: Assembly, runner: TokenRunner) -> DraftRunner:
        """Return what runs the draft model, or the prediction heads, over the steps of the served model's runner."""
        if isinstance(draft.model, PredictionHeads):
            assert draft.kept is not None
            make_graphs = partial(self._make_graphs, draft)
            query_lens = self.stack.model.graph_query_lens
            return HeadsRunner(
                draft.model, draft.layers, draft.kept, self._manager.tables, runner, make_graphs, query_lens
            )
        draft_model_runner = ModelRunner(
            draft.model,
            draft.layers,
            self._manager.tables,
            draft.device,
            max_num_seqs=self.stack.limits.max_num_seqs,
            max_model_len=self._max_model_len,
            graphs=self._make_graphs(
                draft, forward_of(draft.model), DraftRunner.usual_steps(self.stack.model.graph_query_lens)
            ),
            tokens=runner.tokens,
        )
        return DraftRunner(draft_model_runner, draft.layers)

    def _make_graphs(
        self, assembly: Assembly, forward: Forward, usual_steps: Collection[UsualStep] | None = None
    ) -> StepGraphs | None:
        if self.stack.model.graphs == "off":
            return None
        return StepGraphs.of(
            self.stack,
            assembly.layers,
            forward,
            assembly.device,
            max_model_len=self._max_model_len,
            max_input_lens=assembly.model.description.max_input_lens,
            usual_steps=usual_steps,
            source=self.stack.source,
        )

    def _add_samples(
        self,
        prompt: AnyPrompt,
        params: SamplingParams | None,
        request_id: str | None,
        cache_salt: str,
        owner: str = "",
        hints: Hints | None = None,
    ) -> list[Request]:
        """Queue a request, and return all samples of it."""
        params = checked_params(params, self._default_params)
        hints = checked_sender(cache_salt, owner, hints)
        request_id = self._new_id(request_id)
        # Reading a prompt may take long, and changes no state.
        with self._turns.let_through():
            token_ids, prompt_attributes = self._admission.admit(prompt, params)
            processors: Sequence[tuple[Started, ...]] = [()] * params.n
            if params.processors:
                processors = [self._processors.start(params.processors) for _ in processors]
            start_text = self._text_of(token_ids, params) if self._admission.has_text else None
        request = self._make_request(
            request_id,
            token_ids,
            params if params.n == 1 else params.of_sample(0),
            cache_salt=cache_salt,
            owner=owner,
            hints=hints,
            text_stream=None if start_text is None else start_text(),
            processors=processors[0],
            **prompt_attributes,
        )
        requests = [request]
        if params.n > 1:
            ids = [self._new_id(f"{request_id}/{sample}") for sample in range(1, params.n)]
            forks = bool(self.plan.groups) and not request.num_joint_tokens
            requests += other_samples(request, ids, params, start_text, processors, forks=forks)
        self._add(requests)
        return requests

    @cached_property
    def _make_request(self) -> Callable[..., Request]:
        """What makes a request of its id, tokens and parameters."""
        return partial(
            Request.create,
            eos_token_ids=self.model.description.eos_token_ids,
            max_model_len=self._max_model_len,
            keeps_part=self.plan.keeps_part,
        )

    def _text_of(self, token_ids: Sequence[int], params: SamplingParams) -> Callable[[], TextStream]:
        """Return what starts the text of each sample of a prompt."""
        decode_stream = self.model.decode_stream
        if params.special_tokens:
            decode_stream = partial(decode_stream, special_tokens=True)
        return partial(TextStream, decode_stream, token_ids, StopStrings(params.stop) if params.stop else NO_STOPS)

    def _next_of(self, requests: Sequence[Request]) -> RequestOutput | None:
        """Run steps until one of ``requests`` has something to report, and report it; None once all have ended."""
        reported: list[tuple[Request, RequestOutput]] = []
        self._turns.if_lost(lambda: self._take_back(reported))
        while any(map(self._requests.holds, requests)):
            request = self._requests.first_unreported(requests)
            if request is not None:
                reported.append((request, self._report(request)))
                self._requests.mark_reported(request)
                return reported[0][1]
            self._advance()
        return None

    def _take_back(self, reported: Sequence[tuple[Request, RequestOutput]]) -> None:
        """Mark outputs as unreported that did not reach the requests' owners."""
        for request, output in reported:
            request.take_back(output)
            self._requests.mark_unreported(request)

    def _report(self, request: Request) -> RequestOutput:
        """Return a request's new output; a request whose tokens cannot be turned into text ends here."""
        if request.text_stream is not None and not request.read_text():
            self._scheduler.end(request, "error")
            request.finish_reason = "error"
        return request.report()

    def _weights_may_have_changed(self) -> None:
        self.__dict__.pop("_fingerprint", None)

    def _num_samples(self, params: SamplingParams | None) -> int:
        """Return the number of outputs for a refused request."""
        count = params.n if isinstance(params, SamplingParams) else 1
        return count if count <= self.stack.engine.max_samples else 1

    @cached_property
    def _processors(self) -> Processors:
        return Processors(self._registry, self.model)

    @cached_property
    def _prompt_prefixes(self) -> PromptPrefixes:
        return PromptPrefixes(
            self._manager, self._admission, self._serve_one, self._scheduler.note_pin, self._turns.let_through
        )

    @cached_property
    def _fingerprint(self) -> dict[str, str]:
        return fingerprint_of(self.model, self._draft)

    @cached_property
    def _prefix_files(self) -> PrefixFiles:
        if self._ranks is not None:
            raise PrefixFileError(
                f"each of the {self._ranks.num_ranks} ranks has a share of the heads, and a file of saved prefixes "
                "holds all of them: save and load prefixes in one process, or keep them cached with pin_prefix",
                "several_ranks",
            )
        return PrefixFiles(
            self._manager,
            self._prompt_prefixes,
            self.setup,
            self._storage,
            lambda: self._fingerprint,
            self.model.description.vocab_size,
            None if self.stack.cache.key is None else self._secret,
            self._turns.let_through,
        )

    def _serve_one(self, prompt: AnyPrompt, params: SamplingParams, *, cache_salt: str) -> None:
        requests = self._add_samples(prompt, params, None, cache_salt)
        try:
            while any(request.finish_reason is None for request in requests):
                self._advance()
            for request in requests:
                if request.error is not None:
                    raise RequestError(request.error, code="failed")
        finally:
            self._forget(requests)

    def _refused_output(self, index: int, prompt: AnyPrompt, error: KVFrameError) -> RequestOutput:
        """Return the output for a refused prompt in a batch."""
        return RequestOutput(
            request_id=f"refused-{index}",
            prompt_token_ids=self._admission.ids_of(prompt),
            finish_reason="refused",
            error=str(error),
        )
