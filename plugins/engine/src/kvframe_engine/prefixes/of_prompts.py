"""Computes and pins prefixes of prompts: the whole blocks that other requests can continue from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import attrs

from kvframe import InputSequence, KVCacheManager, Pin
from kvframe.contract.errors import RequestError
from kvframe_engine.requests.admission import Admission, check_salt
from kvframe_engine.requests.params import SamplingParams
from kvframe_engine.requests.progress import NO_INPUTS, NO_SEQUENCES, input_sequences
from kvframe_engine.requests.prompt import AnyPrompt, Prompt

JUST_COMPUTE = SamplingParams(max_new_tokens=1, ignore_eos=True)
"""The parameters of a request that only computes its prompt; for this, it generates one token."""


@attrs.frozen
class Prefix:
    """The part of a prompt that requests can continue from.

    Attributes:
        token_ids: Its tokens, whole blocks in every group.
        salt: The salt of the requests that share it.
        inputs: The inputs of these requests, by name.
        prompt: The prompt that computes it.
    """

    token_ids: tuple[int, ...]
    salt: str
    inputs: Mapping[str, InputSequence]
    prompt: AnyPrompt


class Compute(Protocol):
    """Serves a request to its end while other requests continue."""

    def __call__(self, prompt: AnyPrompt, params: SamplingParams, *, cache_salt: str) -> None:
        """Serve the request; raise ``RequestError`` if it fails."""


class PromptPrefixes:
    """Computes prefixes of prompts, and pins them."""

    def __init__(
        self,
        manager: KVCacheManager,
        admission: Admission,
        compute: Compute,
        note_pin: Callable[[], None],
        let_through: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Work on an engine's cache.

        Args:
            manager: The cache.
            admission: Makes tokens of prompts, or refuses them.
            compute: Serves a request.
            note_pin: Called when a prefix was pinned.
            let_through: Returns a context manager that lets interrupts through while a prompt is read.
        """
        self._manager = manager
        self._admission = admission
        self._compute = compute
        self._note_pin = note_pin
        self._let_through = let_through

    def pin(self, prompt: AnyPrompt, salt: str) -> Pin:
        """Compute a prompt's prefix if it is not cached, and pin it."""
        self.check_caching()
        prefix = self.of(prompt, salt)
        self.compute(prefix)
        pin = self._manager.pin(prefix.token_ids, salt=salt, inputs=prefix.inputs)
        self._note_pin()
        return pin

    def unpin(self, pin: Pin) -> None:
        """Release the prefix; its blocks stay cached until they are evicted."""
        self._manager.unpin(pin)

    def compute(self, prefix: Prefix) -> None:
        """Compute a prefix; it stays cached until the next step at least. Raise ``RequestError`` if that failed."""
        self._compute(prefix.prompt, JUST_COMPUTE, cache_salt=prefix.salt)

    def check_caching(self) -> None:
        """Raise ``RequestError`` if the engine has no prefix cache."""
        if not self._manager.prefix_caching:
            raise RequestError(
                "this engine keeps no prefixes: prefix_caching is off in the stack's [cache], the model keeps nothing "
                "of the past, or the tokens of its prompts see each other in both directions",
                code="no_prefix_caching",
            )

    def of(self, prompt: AnyPrompt, salt: str) -> Prefix:
        """Return a prompt's prefix.

        Raises:
            RequestError: The prompt can never be served, or no request could continue from it.
            ModelError: It is text, and the model has no tokenizer.
        """
        check_salt(salt)
        with self._let_through():
            token_ids, attributes = self._admission.admit(prompt, JUST_COMPUTE)
        inputs = attributes.get("inputs", NO_INPUTS)
        alignment = self._manager.plan.alignment
        kept_tokens = tuple(token_ids[: len(token_ids) // alignment * alignment])
        if not kept_tokens and not inputs:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, and prefixes are kept in whole blocks of {alignment}",
                code="prompt_too_short",
            )
        if not inputs:
            return Prefix(kept_tokens, salt, NO_SEQUENCES, kept_tokens)
        whole_prompt = prompt if isinstance(prompt, Prompt) else Prompt(encoder=prompt)
        # Without a whole block, only the inputs are kept, and all tokens of the prompt are computed.
        computed = attrs.evolve(whole_prompt, decoder=kept_tokens or token_ids)
        return Prefix(kept_tokens, salt, input_sequences(inputs), computed)
