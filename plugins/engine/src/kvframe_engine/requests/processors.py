"""The logits processors of an engine's requests: made when the first request names one, and asked for states."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs

from kvframe import Registry
from kvframe.contract.errors import KVFrameError, ModelError, PluginError, RequestError
from kvframe.contract.foreign import call
from kvframe.contract.model import LoadedModel
from kvframe_engine.contract.logits import LogitsProcessor, Vocabulary
from kvframe_engine.requests.params import bad_params


@attrs.frozen(eq=False)
class Started:
    """A processor of one sample.

    Attributes:
        whose: The processor's name for errors.
        processor: The processor.
        state: What it keeps of the sample.
    """

    whose: str
    processor: LogitsProcessor
    state: Any


class Processors:
    """Makes the logits processors that requests name, each once."""

    def __init__(self, registry: Registry, model: LoadedModel) -> None:
        """Take where processors are looked up, and the model that they serve."""
        self._registry = registry
        self._model = model
        self._made: dict[str, tuple[str, LogitsProcessor]] = {}

    def start(self, asked: Mapping[str, Mapping[str, Any]]) -> tuple[Started, ...]:
        """Return the processors of one sample, in the order of their names.

        Args:
            asked: The options of each by name.

        Raises:
            RequestError: There is no such processor, it cannot serve the model, it refuses the options, or it fails
                (``bad_params``).
        """
        return tuple(self._start(name, options) for name, options in sorted(asked.items()))

    def _start(self, name: str, options: Mapping[str, Any]) -> Started:
        try:
            if name not in self._made:
                self._made[name] = self._make(name)
            whose, processor = self._made[name]
            state = call(f"{whose}: start()", partial(processor.start, options), passes=(RequestError,))
        except RequestError:
            raise
        except KVFrameError as error:
            raise bad_params(str(error)) from error
        return Started(whose, processor, state)

    def _make(self, name: str) -> tuple[str, LogitsProcessor]:
        claim, description = self._registry.logits_processors.get(name), self._model.description
        if description.vocab_size is None:
            raise ModelError(f"{description.name} does not say how many tokens it has, which logits processors need")
        whose = f"logits processor {claim.id!r}"
        tokenizer_json = call(f"the tokenizer of {description.name}", self._model.tokenizer_json)
        vocabulary = Vocabulary(
            size=description.vocab_size, eos_token_ids=description.eos_token_ids, tokenizer_json=tokenizer_json
        )
        processor: Any = call(f"{whose}: __init__()", partial(claim.load(), vocabulary), passes=(RequestError,))
        if not isinstance(processor, LogitsProcessor):
            raise PluginError(f"{whose} is no LogitsProcessor")
        return whose, processor
