"""The engine: it continues prompts with a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path

import attrs

from kvframe.cache.pins import Pin
from kvframe.contract.errors import KVFrameError, ModelError, RequestError, shown
from kvframe.engine.assembly import Assembly
from kvframe.engine.core import EngineCore
from kvframe.engine.graphs.step_graphs import StepGraphs
from kvframe.engine.prefixes.fingerprint import fingerprint_of
from kvframe.engine.prefixes.named import Prefixes
from kvframe.engine.prefixes.saved import SavedPrefix, SavedPrefixes, checked_path
from kvframe.engine.requests.batch import checked_params, params_for_each, params_of_each, sample_ids
from kvframe.engine.requests.params import SamplingParams
from kvframe.engine.requests.prompt import AnyPrompt, prompts_of
from kvframe.engine.requests.request import Request, RequestOutput
from kvframe.engine.requests.salts import check_salt, salt_of_each
from kvframe.engine.requests.stops import StopStrings
from kvframe.engine.requests.text import TextStream
from kvframe.engine.running.runner import SkipPolicy, TokenRunner
from kvframe.engine.streaming import RequestStream
from kvframe.engine.turns import verb


class Engine(EngineCore[Request]):
    """Continues prompts with one model.

    Requests are added at any time; each ``step`` computes one batch of them. An exception of the model, of a plugin or
    of Ctrl-C ends the requests of that step (``finish_reason="error"``), gives their blocks back, and goes on to the
    caller; the engine can go on with the other requests. One whose output is not numbers, or whose tokens cannot be
    turned into text, ends alone; if it started on a cached prefix, it is computed again without before.

    An engine serves one call at a time. A verb that is called while another one runs, by another thread or by a
    callback, raises ``EngineError`` (``busy``) and changes nothing; after ``close``, every verb but ``close`` does
    (``closed``). ``stats`` always answers. Ctrl-C is raised while a step computes, a prompt is read, or a callback
    runs; at any other time it waits until the engine's books are written, and what the interrupted verb would have
    returned is taken back: a request that was to be added is not there, and an output comes with the next ``step``.

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

    @verb
    def add_request(
        self,
        prompt: AnyPrompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
    ) -> str:
        """Queue a request and return its id.

        Args:
            prompt: Text, or token ids; of a model with an encoder, what that reads, or a ``Prompt`` of two parts.
            params: How to sample and when to stop; greedy, 64 tokens unless given.
            request_id: Its id; a fresh one unless given.
            cache_salt: It shares cached prefixes and inputs with requests of the same salt, and with no others: the
                name of a tenant, say, or of a session.

        Raises:
            RequestError: The request can never be served; ``code`` is one of ``empty_prompt``, ``prompt_too_long``,
                ``bad_token``, ``bad_text``, ``bad_params``, ``bad_salt``, ``bad_id``, ``too_large``, ``no_tokenizer``,
                ``duplicate_id``, and for what goes to an encoder ``missing_input``, ``extra_input``, ``bad_input``,
                ``input_too_long``. Others are not touched.
            ModelError: The prompt is text, and the model has no tokenizer.
        """
        requests = self._add_samples(prompt, params, request_id, cache_salt)
        self._turns.if_lost(lambda: self._forget(requests))
        return requests[0].request_id

    @verb
    def step(self) -> list[RequestOutput]:
        """Compute one batch.

        Returns:
            The requests with new tokens or an end, each with what is new; empty if a step only computed parts of
            prompts, or if there is nothing to do.
        """
        reported: list[tuple[Request, RequestOutput]] = []
        self._turns.if_lost(lambda: self._take_back(reported))
        self._advance()
        for request_id in self._requests.with_news:
            self._report_to(reported, self._requests[request_id])
        return [output for _, output in reported]

    @verb
    def stream(self, prompt: AnyPrompt, params: SamplingParams | None = None, *, cache_salt: str = "") -> RequestStream:
        """Serve one request and yield its outputs as they come; the last one of each sample has a ``finish_reason``.

        Other requests go on meanwhile, and what they produce is kept for ``step``; a ``step`` while the stream is
        open reports what the stream has not yielded yet. The request is added at once, and ends with the stream: when
        the stream is closed, or when it is dropped, be it before its first output.

        Args:
            prompt: As for ``add_request``.
            params: How to sample and when to stop.
            cache_salt: As for ``add_request``.

        Raises:
            RequestError: At once, as ``add_request``.
        """
        requests = self._add_samples(prompt, params, None, cache_salt)
        self._turns.if_lost(lambda: self._forget(requests))
        return RequestStream(self._turns, partial(self._next_of, requests), partial(self._forget, requests))

    @verb
    def generate(
        self,
        prompts: Sequence[AnyPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | Sequence[str] = "",
        on_progress: Callable[[int], None] | None = None,
    ) -> list[RequestOutput]:
        """Serve a batch of requests to their ends.

        Args:
            prompts: As for ``add_request``.
            params: For all, or one for each.
            cache_salt: As for ``add_request``: for all, or one for each.
            on_progress: Called after each step with the number of prompts that are done, refused ones included. Of the
                engine it may call ``stats``, and no verb; what it raises ends the batch.

        Returns:
            One output for each prompt, in order; a refused one has ``finish_reason="refused"`` and an ``error``. Where
            the params ask for ``n`` samples, ``n`` outputs in its place, but one for a prompt whose ``n`` is refused.

        Raises:
            RequestError: An argument is none for a batch (``bad_prompts``, ``bad_params``, ``bad_salt``).
            ModelError: No prompt can be served, and one is text, but the model has no tokenizer.
        """
        with self._turns.let_through():
            prompts = prompts_of(prompts)
            params = params_for_each(params, len(prompts))
            salts = salt_of_each(cache_salt, len(prompts))
        ended = self._serve(
            len(prompts),
            lambda index: self._add_samples(prompts[index], params[index], None, salts[index]),
            on_progress,
        )
        outputs = []
        for index, samples in enumerate(ended):
            if isinstance(samples, KVFrameError):
                refused = self._refused_output(index, prompts[index], samples)
                outputs += [attrs.evolve(refused, sample=sample) for sample in range(self._num_samples(params[index]))]
            else:
                outputs += [self._report(request) for request in samples]
        return outputs

    # --- prefixes that stay -------------------------------------------------------------------------------------------

    @verb
    def pin_prefix(self, prompt: AnyPrompt, *, cache_salt: str = "") -> Pin:
        """Keep a prompt's prefix, such as a system prompt, in the cache until ``unpin``; computes what is missing.

        Kept is the longest part of whole blocks, and what the prompt brings for an encoder. Other requests go on while
        it is computed, and what they produce is kept for ``step``. A reset of the prefix cache ends pins.

        Args:
            prompt: As for ``add_request``.
            cache_salt: As for ``add_request``: requests of the same salt find it.

        Returns:
            The pin; its ``num_tokens`` says how many of the prompt's tokens are kept.

        Raises:
            RequestError: As ``add_request``, or the prompt has no whole block (``prompt_too_short``), there is no
                prefix cache (``no_prefix_caching``), or a request of the greatest length would not have room beside all
                pins any more (``no_room``).
            ModelError: As ``add_request``.
        """
        pin = self._prefixes.pin(prompt, cache_salt)
        self._turns.if_lost(lambda: self._prefixes.unpin(pin))
        return pin

    @verb
    def unpin(self, pin: Pin) -> None:
        """Let go of a pin; its prefix stays cached until it is evicted. Nothing if it is not held any more.

        Raises:
            RequestError: That is no pin (``bad_pin``).
        """
        if not isinstance(pin, Pin):
            raise RequestError(f"unpin takes what pin_prefix returned, not {shown(pin)}", code="bad_pin")
        self._prefixes.unpin(pin)

    @verb
    def save_prefixes(
        self, path: str | Path, prompts: Sequence[AnyPrompt], *, cache_salt: str | Sequence[str] = ""
    ) -> list[SavedPrefix]:
        """Write prompts' prefixes to a file, for ``load_prefixes`` in another process; computes what is missing.

        Saved are their longest parts of whole blocks, and what they bring for an encoder: the bytes of the pages that a
        request needs to go on, each once, their token ids and salt as they are, and for an encoder's input its key
        (``kvframe.content_key``), for which the stack's ``[cache]`` has to have a ``key``. The file is written beside
        its place and put there when it is whole.

        Args:
            path: The file; one that is there is replaced.
            prompts: As for ``add_request``, each with a whole block of tokens at least.
            cache_salt: As for ``add_request``: for all, or one for each.

        Returns:
            For each prompt, what of it was saved.

        Raises:
            RequestError: As ``pin_prefix``, but for want of room. Nothing is written.
            PrefixFileError: It cannot be written (``unwritable``), or the stack has no key for what a prompt brings for
                an encoder (``no_key``). What was there is as it was.
            ModelError: As ``add_request``, or the model cannot be told from others.
        """
        with self._turns.let_through():
            prompts = prompts_of(prompts)
        return self._saved_prefixes.save(checked_path(path, "unwritable"), prompts, cache_salt)

    @verb
    def load_prefixes(self, path: str | Path, *, cache_salt: str | None = None) -> list[SavedPrefix]:
        """Put the prefixes of a file into the cache: requests find them as if they had been computed here.

        They are loaded in the file's order, and cached blocks that no request uses are evicted for them. One for which
        the pool has no room beside those before it is left out, and those after it are tried. Then they are cached as
        all others are; ``pin_prefix`` keeps them.

        The file's checksums tell of damage, not of malice: what it says is the state of a prefix is believed, as the
        model's weights are. Only load files from where you would load weights.

        Args:
            path: A file of ``save_prefixes``, of the same model, weights and cache pages.
            cache_salt: The salt of the requests that are to find them; the one that each was saved under unless given.

        Returns:
            For each prefix of the file, its tokens, and whether it is in the cache now.

        Raises:
            PrefixFileError: The file is damaged, or of another version, model or kind of pages, or it has inputs and
                was saved with another key than this stack's, or this one has none. Nothing was changed.
            RequestError: There is no prefix cache (``no_prefix_caching``), no request could be added besides those
                that run (``busy``), or the salt is none (``bad_salt``). Nothing was changed.
            ModelError: The model cannot be told from others.
        """
        loaded = self._saved_prefixes.load(checked_path(path, "unreadable"), cache_salt)
        self._cache_events.deliver()
        return loaded

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_model(self) -> None:
        description, step_local = self.model.description, self.grouping.step_local
        if description.generates and not step_local:
            return
        why = f"; its layer {step_local[0]!r} keeps nothing of the tokens before" if step_local else ""
        raise ModelError(
            f"{description.name} does not generate text{why}: it is for embeddings, which `kvframe embed` and "
            "kvframe.Embedder make"
        )

    def _make_runner(self, assembly: Assembly, skip_policy: SkipPolicy | None) -> TokenRunner:
        return TokenRunner(
            self.model,
            assembly.layers,
            self._manager.tables,
            assembly.device,
            max_num_seqs=self.stack.engine.max_num_seqs,
            max_model_len=self._max_model_len,
            skip_policy=skip_policy,
            graphs=StepGraphs.of(
                self.stack.engine,
                assembly.layers,
                self.model.forward,
                assembly.device,
                max_model_len=self._max_model_len,
                has_inputs=bool(self.model.description.max_input_lens),
                source=self.stack.source,
            ),
        )

    def _add_samples(
        self, prompt: AnyPrompt, params: SamplingParams | None, request_id: str | None, cache_salt: str
    ) -> list[Request]:
        """Queue a request, and return all samples of it."""
        params = checked_params(params)
        check_salt(cache_salt)
        request_id = self._new_id(request_id)
        # Reading a prompt may take long, and leaves no trace.
        with self._turns.let_through():
            token_ids, inputs = self._admission.admit(prompt, params)
            stops = StopStrings(params.stop)
        ids = [self._new_id(each) for each in sample_ids(request_id, params.n)]
        requests = [
            Request.create(
                each_id,
                token_ids,
                each,
                eos_token_ids=self.model.description.eos_token_ids,
                max_model_len=self._max_model_len,
                text_stream=TextStream(self._decode, token_ids, stops) if self._admission.has_text else None,
                inputs=inputs,
                cache_salt=cache_salt,
                asked_id=request_id,
                sample=sample,
            )
            for sample, (each_id, each) in enumerate(zip(ids, params_of_each(params), strict=True))
        ]
        if len(requests) > 1 and self.plan.groups:
            # The last token of the prompt is computed by each: what the model gives for it is what they sample from.
            requests[0].pause_at = len(token_ids) - 1
            for request in requests[1:]:
                request.forks_from = requests[0]
        self._add(requests)
        return requests

    def _next_of(self, requests: Sequence[Request]) -> RequestOutput | None:
        """Serve the engine until some requests have news, and report them; None once all have ended."""
        reported: list[tuple[Request, RequestOutput]] = []
        self._turns.if_lost(lambda: self._take_back(reported))
        while any(map(self._requests.holds, requests)):
            request = self._requests.first_with_news(requests)
            if request is not None:
                self._report_to(reported, request)
                return reported[0][1]
            self._advance()
        return None

    def _report_to(self, reported: list[tuple[Request, RequestOutput]], request: Request) -> None:
        """Report a request, noting what is to be taken back if its owner does not get the report."""
        reported.append((request, self._report(request)))
        self._requests.take(request.request_id)

    def _take_back(self, reported: Sequence[tuple[Request, RequestOutput]]) -> None:
        """Let outputs be reported once more that did not reach the requests' owners."""
        for request, output in reported:
            request.take_back(output)
            self._requests.give_back(request)

    def _report(self, request: Request) -> RequestOutput:
        """Return what a request has to report; one whose tokens cannot be turned into text ends here."""
        if not request.read_text():
            self._scheduler.end(request, "error")
            request.finish_reason = "error"
        return request.report()

    def _weights_may_have_changed(self) -> None:
        self.__dict__.pop("_fingerprint", None)

    def _num_samples(self, params: SamplingParams | None) -> int:
        """Return how many outputs stand for a request that was refused."""
        count = params.n if isinstance(params, SamplingParams) else 1
        return count if count <= self.stack.engine.max_samples else 1

    @cached_property
    def _prefixes(self) -> Prefixes:
        return Prefixes(
            self._manager, self._admission, self._serve_one, self._scheduler.note_pin, self._turns.let_through
        )

    @cached_property
    def _fingerprint(self) -> dict[str, str]:
        return fingerprint_of(self.model)

    @cached_property
    def _saved_prefixes(self) -> SavedPrefixes:
        return SavedPrefixes(
            self._manager,
            self._prefixes,
            self.grouping,
            self._storage,
            lambda: self._fingerprint,
            self.model.description.vocab_size,
            None if self.stack.cache.key is None else self._secret,
            self._turns.let_through,
        )

    def _serve_one(self, prompt: AnyPrompt, params: SamplingParams, *, cache_salt: str) -> None:
        requests = self._add_samples(prompt, params, None, cache_salt)
        try:
            while any(each.finish_reason is None for each in requests):
                self._advance()
            for request in requests:
                if request.error is not None:
                    raise RequestError(request.error, code="failed")
        finally:
            self._forget(requests)

    def _refused_output(self, index: int, prompt: AnyPrompt, error: KVFrameError) -> RequestOutput:
        """Return what stands for a refused prompt among a batch's outputs."""
        return RequestOutput(
            request_id=f"refused-{index}",
            prompt_token_ids=self._admission.ids_of(prompt),
            finish_reason="refused",
            error=str(error),
        )

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.model.decode(list(token_ids)) or ""
