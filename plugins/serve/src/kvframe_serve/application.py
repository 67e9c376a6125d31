"""The ASGI application for one model, with the processes that read bodies; something else runs its requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from transformers import AutoTokenizer

from kvframe import Embedder, Engine, Stack, describe
from kvframe.contract import ModelError
from kvframe_serve.access import Access
from kvframe_serve.answering import Chats, Completions, Embeddings
from kvframe_serve.answers import find_format
from kvframe_serve.limits import Limits
from kvframe_serve.logprobs import TokenTexts
from kvframe_serve.metrics import RequestTimes
from kvframe_serve.quotas import Quota
from kvframe_serve.reading.chat import template_of
from kvframe_serve.reading.process import Readers
from kvframe_serve.reading.question import ServedModel
from kvframe_serve.routes import Serving, make_application
from kvframe_serve.runner import RequestRunner

Task = Literal["generate", "embed"]
"""What a server does: it generates tokens, or makes embeddings."""


class Application:
    """Reads requests by OpenAI's interface, lets them run, and answers them.

    Attributes:
        asgi: The ASGI application.
        served: The model.
        quota: The samples that clients wait for.
        times: The times of requests.
        registry: The metrics of ``/metrics``.
    """

    def __init__(
        self, served: ServedModel, limits: Limits, *, keys: Collection[str], health: Callable[[], Awaitable[str]]
    ) -> None:
        """Load the tokenizer and start the processes that read bodies.

        Args:
            served: The model.
            limits: What is taken from clients.
            keys: The keys that are accepted; without keys, every caller is served.
            health: Returns why requests are not served now; empty if they are.

        Raises:
            ModelError: The model has no tokenizer.
        """
        self.served = served
        self._answers = limits.answers
        self._tokenizer = _load_tokenizer(Path(served.path))
        self._readers = Readers(served, max_seconds=limits.read_seconds, max_memory_mb=limits.read_memory_mb)
        try:
            self._readers.wait()
        except BaseException:
            self._readers.close()
            raise
        per_key = limits.max_requests_per_key or (limits.max_requests // 2 if keys else limits.max_requests)
        self.quota = Quota("samples", max_total=limits.max_requests, max_per_key=max(1, per_key))
        self.registry = CollectorRegistry()
        self.times = RequestTimes(self.registry)
        self._serving = Serving(
            name=served.name,
            max_model_len=served.max_model_len,
            readers=self._readers,
            registry=self.registry,
            embeds=not served.generates,
            health=health,
            count_refusal=self.times.refused,
        )
        self.asgi: Any = Access(
            make_application(self._serving),
            self.quota,
            keys=keys,
            max_body_bytes=limits.max_body_bytes,
            client_seconds=limits.client_seconds,
            count_refusal=self.times.refused,
            hint_limits=limits.hint_limits,
        )

    def run_by(self, runner: RequestRunner) -> None:
        """Answer questions from now on; ``runner`` runs their requests."""
        answerers, name, times = self._serving.answerers, self.served.name, self.times
        if not self.served.generates:
            answerers["/v1/embeddings"] = Embeddings(name, runner, times)
            return
        serving = (name, runner, times, TokenTexts(self._tokenizer))
        answerers["/v1/completions"] = Completions(*serving)
        answerers["/v1/chat/completions"] = Chats(
            *serving,
            answer_format=find_format(template_of(self._tokenizer), self._answers),
            special=_special_tokens(self._tokenizer),
        )

    def close(self) -> None:
        """End the processes that read bodies. It may be called twice."""
        self._readers.close()


def load_engine(path: Path, stack: Stack | None, task: Task | None) -> Engine | Embedder:
    """Load a model and make its engine.

    Args:
        path: The model's folder.
        stack: The stack; the default stack unless given.
        task: What the engine does; unless given, what the model is for.

    Raises:
        KVFrameError: The stack, the model or the memory is wrong.
    """
    if task is None:
        task = "generate" if describe(path).generates else "embed"
    made_by: Any = Engine if task == "generate" else Embedder
    engine: Engine | Embedder = made_by.from_pretrained(path, stack=stack)
    return engine


def served_model(path: Path, name: str | None, engine: Engine | Embedder, limits: Limits) -> ServedModel:
    """Return what an application needs to know of an engine's model.

    Args:
        path: The model's folder.
        name: The name that clients use; the folder's name unless given.
        engine: The engine.
        limits: What is taken from clients.
    """
    return ServedModel(
        path=str(path),
        name=name or path.resolve().name,
        max_model_len=engine.plan.max_model_len,
        most_tokens=_most_tokens(engine),
        generates=isinstance(engine, Engine),
        defaults=engine.model.description.sampling,
        max_new_tokens=limits.max_new_tokens,
        max_samples=limits.max_requests,
        max_logprobs=limits.max_logprobs,
        answers=limits.answers,
        vocab_size=engine.model.description.vocab_size or 0,
    )


def _load_tokenizer(path: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} has no tokenizer, which a server needs: {error}") from error


def _special_tokens(tokenizer: Any) -> frozenset[str]:
    """Return the texts of all special tokens, those that have no name in the tokenizer's config too."""
    special_texts = (
        token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special
    )
    return frozenset((*tokenizer.all_special_tokens, *special_texts))


def _most_tokens(engine: Engine | Embedder) -> int:
    """Return the most tokens of a request that fit the cache alone."""
    lengths = range(1, engine.plan.max_model_len + 1)
    return max(1, bisect_right(lengths, 0, key=lambda length: not engine.plan.fits(length)))
