"""The embedder: it makes embeddings of texts with a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self, get_args

import attrs

from kvframe import Hints, Setup, Stack
from kvframe.contract.description import Pooling, PoolingMode
from kvframe.contract.errors import KVFrameError, RequestError, StackError
from kvframe.contract.model import LoadedModel
from kvframe_engine.assembly import Assembly
from kvframe_engine.core import EngineCore
from kvframe_engine.ranks.follower import Follower
from kvframe_engine.ranks.leader import Leader
from kvframe_engine.requests.admission import checked_sender
from kvframe_engine.requests.prompt import hints_of_each, owner_of_each, prompts_of, salt_of_each
from kvframe_engine.running.model_runner import SkipPolicy
from kvframe_engine.running.pooling import EmbeddingOutput, EmbeddingRequest, PoolingRunner
from kvframe_engine.turns import verb


class Embedder(EngineCore[EmbeddingRequest]):
    """Makes embeddings of texts with one model, an encoder or a decoder.

    Texts can be added at any time; each ``step`` computes one batch of them, of mixed lengths. If only the last token
    makes the embedding, a decoder's keys and values are cached as in an ``Engine``: a long text is computed in chunks,
    and a prefix that texts share is computed once. If the model raises, the requests of that step end, their blocks are
    freed, and the exception is raised to the caller; the embedder can continue with the other requests. Like
    ``Engine``, it serves one call at a time, and none after ``close``.

    Attributes:
        model: The model, without head.
        pooling: How its hidden states become an embedding.
        stack: The stack that was asked for.
        grouping: The cache groups; none for an encoder.
        plan: The cache plan.
        choices: For each layer, its wrapper chain, the chosen backend, and why the other backends were not chosen.
    """

    def __init__(
        self,
        model: LoadedModel,
        setup: Setup,
        *,
        pooling: PoolingMode | None = None,
        normalize: bool | None = None,
        poison_freed: bool = False,
        skip_policy: SkipPolicy | None = None,
        ranks: Leader | Follower | None = None,
    ) -> None:
        """Plan and allocate the cache, choose backends, and attach the model.

        Args:
            model: A loaded model, not attached.
            setup: What a stack does with it.
            pooling: Which tokens make an embedding. Unless given, the checkpoint decides; if it does not say, the last
                token of a decoder and all tokens of an encoder.
            normalize: Whether an embedding is divided by its length. Unless given, the checkpoint decides; if it does
                not say, no.
            poison_freed: As for ``Engine``.
            skip_policy: As for ``Engine``.
            ranks: As for ``Engine``.

        Raises:
            ModelError: The model gives no hidden states, its checkpoint pools them in a way that kvframe does not know,
                or as for ``Engine``.
            RequestError: ``pooling`` is not a pooling mode (``bad_params``).
            StackError: The stack asks for drafts, or for graphs of some sizes (``nothing_generated``).
            KVFrameError: As for ``Engine``.
        """
        _check_generates_nothing(setup.stack)
        if pooling is not None and pooling not in get_args(PoolingMode):
            raise RequestError(
                f"pooling must be one of {', '.join(get_args(PoolingMode))}, not {pooling!r}", code="bad_params"
            )
        said = model.pooling() if pooling is None or normalize is None else None
        if pooling is None:
            pooling = said.mode if said is not None else "last" if model.description.generates else "mean"
        if normalize is None:
            normalize = said is not None and said.normalize
        self.pooling = Pooling(pooling, normalize)
        without_head = model.without_head()
        super().__init__(
            without_head,
            attrs.evolve(setup, description=without_head.description),
            poison_freed=poison_freed,
            skip_policy=skip_policy,
            ranks=ranks,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        stack: Stack | None = None,
        plugins: Sequence[ModuleType] = (),
        pooling: PoolingMode | None = None,
        normalize: bool | None = None,
        poison_freed: bool = False,
        skip_policy: SkipPolicy | None = None,
    ) -> Self:
        """Load a model from disk and make an embedder for it: the whole flow. With several ranks, as for ``Engine``.

        Args:
            path: A model's folder, of a kind that an installed plugin recognises.
            stack: What to use; the defaults unless given.
            plugins: Manifest modules to use beside the installed plugins.
            pooling: As for the constructor.
            normalize: As for the constructor.
            poison_freed: As for the constructor.
            skip_policy: As for the constructor.

        Raises:
            KVFrameError: The stack, a plugin that it names, the model or the memory is wrong.
        """
        return cls._set_up(
            path,
            stack,
            plugins,
            pooling=pooling,
            normalize=normalize,
            poison_freed=poison_freed,
            skip_policy=skip_policy,
        )

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any = None,
        *,
        stack: Stack | None = None,
        plugins: Sequence[ModuleType] = (),
        pooling: PoolingMode | None = None,
        normalize: bool | None = None,
        poison_freed: bool = False,
        skip_policy: SkipPolicy | None = None,
    ) -> Self:
        """Make an embedder for a model that is in memory, as ``Engine.from_model`` makes an engine.

        Args:
            model: As for ``Engine``.
            tokenizer: As for ``Engine``.
            stack: As for ``Engine``.
            plugins: As for ``Engine``.
            pooling: As for the constructor.
            normalize: As for the constructor.
            poison_freed: As for the constructor.
            skip_policy: As for the constructor.

        Raises:
            KVFrameError: The stack, a plugin that it names, the model or the memory is wrong.
        """
        return cls._take(
            model,
            tokenizer,
            stack,
            plugins,
            pooling=pooling,
            normalize=normalize,
            poison_freed=poison_freed,
            skip_policy=skip_policy,
        )

    @verb
    def add_request(
        self,
        text: str | Sequence[int],
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        owner: str = "",
        hints: Hints | None = None,
    ) -> str:
        """Queue a text and return the id of its request.

        Args:
            text: Text, or token ids. It is not truncated; only the tokenizer's special tokens are added.
            request_id: Its id; a fresh one unless given.
            cache_salt: The request shares cached prefixes with texts of the same salt only.
            owner: Whose request it is, as for ``Engine``.
            hints: As for ``Engine``.

        Raises:
            RequestError: The text can never be embedded; ``code`` is one of ``empty_prompt``, ``prompt_too_long``,
                ``exceeds_step``, ``bad_token``, ``bad_text``, ``bad_salt``, ``bad_owner``, ``bad_hints``,
                ``bad_id``, ``too_large``, ``duplicate_id``. Other requests are unchanged.
            ModelError: ``text`` is a string, and the model has no tokenizer.
        """
        requests = self._add_text(text, request_id, cache_salt, owner, hints)
        self._turns.if_lost(lambda: self._forget(requests))
        return requests[0].request_id

    @verb
    def step(self) -> list[EmbeddingOutput]:
        """Compute one batch.

        Returns:
            The requests that ended; empty if the step only computed parts of texts, or if there was nothing to do.
        """
        reported: list[EmbeddingRequest] = []
        self._turns.if_lost(lambda: self._take_back(reported))
        self._advance()
        for request in list(self._requests.unreported.values()):
            reported.append(request)
            self._requests.mark_reported(request)
        return [request.report() for request in reported]

    @verb
    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        cache_salt: str | Sequence[str] = "",
        owner: str | Sequence[str] = "",
        hints: Hints | Sequence[Hints | None] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[EmbeddingOutput]:
        """Embed a batch of texts.

        Args:
            texts: Texts or token ids.
            cache_salt: As for ``add_request``: one for all texts, or one for each.
            owner: As for ``add_request``: one for all texts, or one for each.
            hints: As for ``add_request``: one value for all texts, or one for each.
            on_progress: Called after each step with the number of finished texts, refused ones included. It may call
                ``stats``, and no verb of the embedder; an exception that it raises ends the batch.

        Returns:
            One output for each text, in order. If some texts are refused and others embedded, a refused one has
            ``finish_reason="refused"`` and an ``error``.

        Raises:
            RequestError: An argument is not valid for a batch (``bad_prompts``, ``bad_params``, ``bad_salt``,
                ``bad_owner``, ``bad_hints``); or every text is refused, with the error of the first one.
            ModelError: Every text is refused, and one is a string, but the model has no tokenizer.
        """
        with self._turns.let_through():
            texts = prompts_of(texts)
            salts = salt_of_each(cache_salt, len(texts))
            owners = owner_of_each(owner, len(texts))
            all_hints = hints_of_each(hints, len(texts))
        ended_requests = self._serve(
            len(texts),
            lambda index: self._add_text(texts[index], None, salts[index], owners[index], all_hints[index]),
            on_progress,
        )
        return [
            self._refused_output(index, texts[index], request)
            if isinstance(request, KVFrameError)
            else request[0].report()
            for index, request in enumerate(ended_requests)
        ]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _add_text(
        self, text: str | Sequence[int], request_id: str | None, cache_salt: str, owner: str, hints: Hints | None
    ) -> list[EmbeddingRequest]:
        hints = checked_sender(cache_salt, owner, hints)
        request_id = self._new_id(request_id)
        if isinstance(text, str) and not text.strip():
            raise RequestError("the text is empty", code="empty_prompt")
        # Reading a text may take long, and changes no state.
        with self._turns.let_through():
            token_ids = self._admission.token_ids(text, None)
            num_joint_tokens = self._admission.num_joint_tokens(token_ids)
        requests = [
            EmbeddingRequest.create(request_id, token_ids, self.pooling, cache_salt, owner, hints, num_joint_tokens)
        ]
        self._add(requests)
        return requests

    def _take_back(self, reported: Sequence[EmbeddingRequest]) -> None:
        """Mark outputs as unreported that did not reach the requests' owners."""
        for request in reported:
            self._requests.mark_unreported(request)

    def _make_runner(self, assembly: Assembly, skip_policy: SkipPolicy | None) -> PoolingRunner:
        return PoolingRunner(
            self.pooling,
            self.model,
            assembly.layers,
            self._manager.tables,
            assembly.device,
            max_num_seqs=self.stack.limits.max_num_seqs,
            max_model_len=self._max_model_len,
            skip_policy=skip_policy,
        )

    def _refused_output(self, index: int, text: str | Sequence[int], error: KVFrameError) -> EmbeddingOutput:
        """Return the output for a refused text in a batch."""
        return EmbeddingOutput(
            request_id=f"refused-{index}",
            token_ids=self._admission.ids_of(text),
            finish_reason="refused",
            error=str(error),
        )


def _check_generates_nothing(stack: Stack) -> None:
    """Refuse what only requests that generate can use; ``graphs = "auto"`` means none here."""
    options = stack.model
    options_given = [("drafts", options.drafts is not None), ("graphs", not isinstance(options.graphs, str))]
    for key, is_asked in options_given:
        if is_asked:
            raise StackError(
                f"{stack.source}: engine.{key} is for requests that generate tokens, and an embedder generates none; "
                "leave the key out",
                code="nothing_generated",
            )
