"""Proposers: what guesses the next tokens of requests, so that one step can compute several tokens of a request.

The engine computes the guessed tokens, the *drafts*, together with a request's last token. It samples a token at each
position as it would without drafts, and accepts drafts as long as they equal the sampled tokens. A wrong draft costs
time. It never changes a token: tokens, seeds and log-probabilities are those of a run without a proposer.

Nothing here imports NumPy or torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs

from kvframe.contract.growth import Growing

if TYPE_CHECKING:
    import torch


# Not frozen: one is made for each request that is asked about, and a frozen one takes four times as long.
@attrs.define(eq=False)
class DraftRequest:
    """A request for which tokens are to be proposed.

    Attributes:
        request_id: Its name, the same in every step; no other request of the engine ever has it.
        token_ids: All its tokens so far, prompt and generated ones. Read only, and valid during the call: the request
            appends to it.
        num_prompt_tokens: How many of them are the prompt.
        max_drafts: The most tokens that are wanted for it, at least one.
        cache_salt: Requests of different salts must not learn anything of each other's tokens.
        continuation: The tokens with which the proposer's draft model continues it, or the model's prediction heads,
            at most ``max_drafts``; empty if the proposer uses neither, or the host did not run it for this request.
        hidden_states: ``[num_new, hidden_size], device``, in the model's dtype: a row for each token that the last step
            gave the request, accepted drafts and the token after them, in order. Row ``i`` is the hidden state that the
            model's head took the logits of ``token_ids[i - num_new]`` from. None if the proposer does not need hidden
            states, or if the engine's last step gave this request no token, as after a preemption. Valid during the
            call.
    """

    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    max_drafts: int
    cache_salt: str
    continuation: Sequence[int] = ()
    hidden_states: torch.Tensor | None = None


@attrs.define(kw_only=True, eq=False)
class Proposer(Growing, ABC):
    """Guesses the tokens that follow a request's last one: the base of every proposer.

    A proposer is an attrs class. Its fields are the options that a stack gives; other fields may hold what it knows of
    requests. One engine makes it and calls it, in one thread.

    Attributes:
        needs_hidden_states: Whether requests are given hidden states of the model (``DraftRequest.hidden_states``). A
            class that sets it is refused (``no_hidden_states``) for a model adapter that gives none.
        uses_prediction_heads: Whether the host is to let the served model's own prediction heads (multi-token
            prediction) continue the requests before each call of ``propose``. A class that sets it is refused
            (``no_prediction_heads``) for a model without such heads, and has no draft model.
        max_drafts: The most draft tokens of a request in a step. Layers with states keep as many states beside a
            request's last one, so that the engine can continue before the first rejected draft.
    """

    name: ClassVar[str]
    """The registered name (``"ngram"``)."""

    needs_hidden_states: ClassVar[bool] = False
    uses_prediction_heads: ClassVar[bool] = False

    max_drafts: int = 4

    def draft_model(self) -> str | None:
        """Return the path of a smaller model with the same tokens, which the host is to run beside the served one.

        The host loads it and plans its layers in the served model's cache. Before each call of ``propose``, it lets
        this model continue the requests, and gives the tokens as ``DraftRequest.continuation``. A host that runs no
        other model refuses such a proposer at set-up, or leaves the continuations empty.

        Called at set-up. None, the default, for no such model.
        """
        return None

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """Guess the next tokens of some requests.

        Called once a step, before the step is computed, with the requests that generate in it. Draft tokens that are
        not in the model's vocabulary are left out, with those after them.

        Args:
            requests: The requests, each once. A request may be missing in some steps; its tokens may have grown by any
                number since it was last seen.

        Returns:
            For each request at most its ``max_drafts`` token ids, in order; none if there is no good guess.

        Raises:
            Exception: Any: the engine logs it, and goes on without the proposer.
        """

    @abstractmethod
    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop what is kept of requests that have ended.

        Called when requests end that ``propose`` may have been called with. A proposer that keeps nothing does nothing.
        """
