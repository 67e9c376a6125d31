"""Faults on demand: an engine that breaks in a chosen place, once, when it comes there for the n-th time."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import attrs
import torch
from kvframe_engine.core import EngineCore
from torch.utils._python_dispatch import TorchDispatchMode

from kvframe.cache.events import CacheEvent
from kvframe.contract.errors import PlanError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.wrapper import FieldUse, MetadataWrapper
from tests.support.engines import host_tier_of, manager_of, runner_of, storage_of
from tests.support.plugins import plugin

KINDS: Mapping[str, str] = {
    "backend": "a backend raises in one of the step's layers",
    "memory": "no memory for a tensor, in any operation of a step: metadata, a layer, sampling, a copy to the host",
    "host": "a copy to host memory, or back, fails",
    "shape": "a wrapper returns metadata of a wrong shape",
    "logits": "the model's output for one request is NaN",
    "state": "what a layer stores of one token is NaN",
    "listener": "a listener to cache events raises; the next one is told all that is cached",
    "told": "Ctrl-C in a listener to cache events; it is told all that is cached the next time",
    "resize": "no memory for a cache of another size; it stays as it is",
    "interrupt": "Ctrl-C in one of the step's layers",
    "books": "Ctrl-C while the scheduler asks for room or commits",
}
"""What can break."""
INTERRUPTS = {"told", "interrupt", "books"}


class InjectedError(RuntimeError):
    """What breaks raises this, unless something else is meant."""


class Faults:
    """Breaks one engine.

    Attributes:
        struck: How often each kind has struck.
    """

    def __init__(
        self, engine: EngineCore[Any], hear: Callable[[Sequence[CacheEvent]], None] = lambda events: None
    ) -> None:
        """Stand in the places of an engine that can break.

        Args:
            engine: The engine.
            hear: Called with its cache events by a listener that may break.
        """
        self.struck: Counter[str] = Counter()
        self._armed: dict[str, int] = {}
        self._is_poisoning = False
        parts: Any = engine
        for group in runner_of(parts)._layers.groups:
            group.backend.attend = self._before(group.backend.attend, "backend", "interrupt")
            group.backend.write_kv = self._spoiling_state(group.backend.write_kv)
        runner_of(parts).forward = self._spoiling_logits(runner_of(parts).forward)
        manager: Any = manager_of(parts)
        manager.extend_rows = self._before(manager.extend_rows, "books")
        manager.commit_rows = self._before(manager.commit_rows, "books")
        tier: Any = host_tier_of(parts)
        if tier is not None:
            tier.storage.copy_out = self._before(tier.storage.copy_out, "host")
            tier.storage.copy_in = self._before(tier.storage.copy_in, "host")
        storage_of(parts).fill = self._with_memory(storage_of(parts).fill)
        storage_of(parts).reserve = self._before(storage_of(parts).reserve, "resize")
        parts._advance = self._short_of_memory(parts._advance)
        Careless.strikes = lambda: self._strikes("shape")
        self._engine = engine
        self._hear = hear
        self.listen()

    def listen(self) -> None:
        """Add a listener to cache events that may raise, unless there is one."""
        if self._engine.on_cache_events is None:
            self._engine.on_cache_events = self._before(self._hear, "listener", "told")

    def arm(self, kind: str, after: int = 0) -> None:
        """Let something break when its place is reached for the ``after + 1``-th time from now on."""
        self._armed[kind] = after

    @property
    def is_armed(self) -> bool:
        """Whether something is to break."""
        return bool(self._armed)

    def disarm(self) -> None:
        """Let nothing break."""
        self._armed.clear()

    def _strikes(self, kind: str) -> bool:
        left = self._armed.get(kind)
        if left is None:
            return False
        if left:
            self._armed[kind] = left - 1
            return False
        del self._armed[kind]
        self.struck[kind] += 1
        return True

    def _before(self, function: Callable[..., Any], *kinds: str) -> Callable[..., Any]:
        def breaking(*arguments: Any, **named: Any) -> Any:
            for kind in kinds:
                if self._strikes(kind):
                    if kind in INTERRUPTS:
                        signal.raise_signal(signal.SIGINT)
                    elif kind == "resize":
                        raise PlanError(KINDS[kind])
                    else:
                        raise InjectedError(KINDS[kind])
            return function(*arguments, **named)

        return breaking

    def _spoiling_logits(self, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def spoiled(*arguments: Any, **named: Any) -> torch.Tensor:
            logits = forward(*arguments, **named)
            if len(logits) and self._strikes("logits"):
                logits = logits.clone()
                logits[-1, 3] = torch.nan
            return logits

        return spoiled

    def _spoiling_state(self, write: Callable[..., None]) -> Callable[..., None]:
        def spoiled(key: torch.Tensor, value: torch.Tensor, *arguments: Any) -> None:
            if len(value) and self._strikes("state"):
                value = value.clone()
                value[-1] = torch.nan
            write(key, value, *arguments)

        return spoiled

    def _short_of_memory(self, advance: Callable[[], None]) -> Callable[[], None]:
        def short() -> None:
            if "memory" not in self._armed:
                advance()
                return
            with _ShortOfMemory(lambda: not self._is_poisoning and self._strikes("memory")):
                advance()

        return short

    def _with_memory(self, fill: Callable[..., None]) -> Callable[..., None]:
        """Let pages be poisoned, as tests ask for, in the middle of the books: no engine does so that serves."""

        def filling(*arguments: Any) -> None:
            self._is_poisoning = True
            fill(*arguments)
            self._is_poisoning = False

        return filling


class _ShortOfMemory(TorchDispatchMode):
    """While it is entered, an operation finds no memory when ``strikes`` says so."""

    def __init__(self, strikes: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._strikes = strikes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._strikes():
            raise torch.OutOfMemoryError(f"no memory for {func}")
        return func(*args, **(kwargs or {}))


@attrs.frozen(kw_only=True)
class Careless(MetadataWrapper):
    """Hands a step on as it is, but when it strikes: then a request is missing from the lengths."""

    name: ClassVar[str] = "careless"
    fields: ClassVar[Mapping[str, FieldUse]] = {
        field.name: FieldUse.RESET for field in attrs.fields(CommonAttentionMetadata) if field.name != "extensions"
    }
    strikes: ClassVar[Callable[[], bool]] = lambda: False

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return the metadata, or what does not fit together."""
        if type(self).strikes():
            return attrs.evolve(metadata, seq_lens=metadata.seq_lens[:-1])
        return metadata


def careless_plugin() -> ModuleType:
    """Return a plugin that brings the careless wrapper."""
    return plugin("careless_plugin", wrappers={Careless.name: Careless})
