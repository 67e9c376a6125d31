"""The requests of an engine: the progress of each, and the table of all by id, with those to be reported."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal, TypeVar

import attrs

from kvframe import FoundPrefix, Hints, InputSequence
from kvframe.contract.model import ModelInput
from kvframe_engine.requests.fetch import Fetch

FinishReason = Literal["stop", "length", "computed", "aborted", "refused", "error"]
"""Why a request ended: a stop token or string; a limit; its prompt is computed, and nothing is generated; its owner
aborted it; it was not admitted; its step failed, or the model's output for it is not numbers."""


NO_INPUTS: Mapping[str, ModelInput] = MappingProxyType({})
NO_SEQUENCES: Mapping[str, InputSequence] = MappingProxyType({})
NO_HINTS: Hints = Hints()
"""The hints of a request whose sender gives none."""


def input_sequences(inputs: Mapping[str, ModelInput]) -> Mapping[str, InputSequence]:
    """Return a request's inputs in the form that the cache takes."""
    return {name: InputSequence(value.num_tokens, value.key) for name, value in inputs.items()}


@attrs.define(eq=False, kw_only=True)
class RequestProgress:
    """A request in an engine. It owns the request's tokens and progress; subclasses add what is done with the tokens.

    Invariant: ``num_computed < len(token_ids)`` until the request ends, so that there is always a token to compute.

    Attributes:
        request_id: Unique among the requests in the engine.
        asked_id: The id that its owner uses: the same for all samples of a request.
        sample: The index of the sample, from 0.
        token_ids: Prompt and generated tokens, as four bytes each; the cache reads them where they are.
        num_prompt_tokens: How many of them are the prompt.
        cache_salt: The request shares cached prefixes and inputs with requests of the same salt only.
        owner: Whose request it is: owners share the engine equally.
        hints: What its sender says of its urgency, and of its prefix.
        order: What a scheduling policy gave it, and a number that grows with each request.
        inputs: Its inputs beside the tokens, by sequence, kept so that they can be computed again.
        input_sequences: The same in the form that the cache takes.
        new_inputs: The inputs whose state the running step computes.
        wants_prompt_rows: Whether the model's output for tokens before the last known one is wanted too.
        num_computed: Tokens whose state is in the cache (as far as layers still need it).
        row: Its row in the block tables while it runs; -1 otherwise.
        runs_alone: Whether it starts from nothing and has the pool for itself until it ends. It is set when there were
            too few blocks although no other request ran, so that the request surely ends.
        is_on_cache: Whether it started on cached state.
        trusts_cache: Whether it may start on cached state; False after its output on cached state was not numbers.
        was_started: Whether it was ever admitted.
        cached: What was found of its prompt, or taken from another sample, when it was first admitted; None before.
        boundaries: Computed tokens at which steps end, ascending: each type of state keeps one there, or other requests
            fork from there.
        pause_at: The one of them from which other requests fork; 0 for none.
        keeps_part: Whether its layers keep a part of its prompt, which they choose when the prompt is computed.
        has_chosen: Whether they have chosen. The tokens that they gave up are then computed again only with the whole
            prompt.
        num_joint_tokens: Its first tokens that see each other in both directions, and are computed in one step; 0 for
            none.
        fetch: What is fetched of its prefix while it waits; None for nothing.
        num_fetches: How often that was begun again, because pages were evicted while it waited.
        promised_tokens: The prefix that was on the device, or was to be brought there, when it began to wait.
        forks_from: The request with the same tokens from which it forks at ``pause_at``, to save computing them; None
            for none, and after the first try.
        finish_reason: Why it ended; None until then.
        error: One sentence if the reason is ``error``.
    """

    request_id: str
    asked_id: str = attrs.field(default=attrs.Factory(lambda self: self.request_id, takes_self=True))
    sample: int = 0
    token_ids: array[int]
    num_prompt_tokens: int
    cache_salt: str = ""
    owner: str = ""
    hints: Hints = NO_HINTS
    order: tuple[float, int] = (0.0, 0)
    inputs: Mapping[str, ModelInput] = NO_INPUTS
    input_sequences: Mapping[str, InputSequence] = NO_SEQUENCES
    new_inputs: frozenset[str] = frozenset()
    wants_prompt_rows: bool = attrs.field(init=False, default=False)
    num_computed: int = 0
    row: int = -1
    runs_alone: bool = False
    is_on_cache: bool = False
    trusts_cache: bool = True
    was_started: bool = False
    cached: FoundPrefix | None = None
    boundaries: tuple[int, ...] = ()
    pause_at: int = 0
    keeps_part: bool = False
    has_chosen: bool = False
    num_joint_tokens: int = 0
    fetch: Fetch | None = None
    num_fetches: int = 0
    promised_tokens: int = 0
    forks_from: RequestProgress | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_final_tokens(self) -> int:
        """The most tokens that it may have at its end."""
        return len(self.token_ids)

    @property
    def has_to_choose(self) -> bool:
        """Whether its layers choose what they keep of its prompt before a further token of it is computed."""
        return self.keeps_part and not self.has_chosen and self.num_computed == self.num_prompt_tokens

    @property
    def next_stop(self) -> int:
        """The number of computed tokens at which its next step has to end."""
        return self.stop_after(self.num_computed)

    @property
    def last_pause(self) -> int:
        """The last number of computed tokens, before all known ones, at which a step has to end; 0 for none."""
        return self.boundaries[-1] if self.boundaries else 0

    def pause_for_forks(self, num_computed: int) -> None:
        """End a step at a number of computed tokens, from which other requests fork."""
        self.pause_at, self.boundaries = num_computed, tuple(sorted({*self.boundaries, num_computed} - {0}))

    def stop_after(self, num_computed: int) -> int:
        """Return the number of computed tokens at which a step has to end that begins after ``num_computed``."""
        index = bisect_right(self.boundaries, num_computed)
        return self.boundaries[index] if index < len(self.boundaries) else len(self.token_ids)

    def end_of_step(self, num_computed: int, budget: int) -> int:
        """Return up to which token a step computes it that begins after ``num_computed`` and has ``budget`` tokens.

        This is ``num_computed`` if the step cannot compute all of its joint tokens.
        """
        end = min(self.stop_after(num_computed), num_computed + budget)
        return end if end >= self.num_joint_tokens else num_computed

    @property
    def num_new_input_tokens(self) -> int:
        """Tokens of inputs that the running step computes."""
        return sum(self.inputs[name].num_tokens for name in self.new_inputs)

    @property
    def uses_prefix(self) -> bool:
        """Whether it may start on a cached prefix. The tokens of the prefix get no logits."""
        return self.trusts_cache and not self.runs_alone and not self.wants_prompt_rows

    @property
    def needs_outcomes(self) -> bool:
        """Whether the host has to know its last token before the model's output is turned into the next one."""
        return False

    @property
    def first_prompt_row(self) -> int:
        """The first token for which it wants the model's output, if it ``wants_prompt_rows``."""
        return len(self.token_ids) - 1

    @property
    def no_outcome(self) -> str:
        """The error for an output of the model that is not numbers."""
        problem = f"the model's output after token {self.num_computed} is not numbers"
        return f"{problem}; try another dtype, and check the weights"

    def fork(self, other: RequestProgress) -> None:
        """Take over the progress of another request, from which this one forks."""
        self.num_computed = other.num_computed

    def forget_partial(self) -> None:
        """Forget the computed parts of results that are not complete, because the model changed."""

    @abstractmethod
    def take(self, outcome: int) -> None:
        """Take the outcome for its last known token; set ``finish_reason`` if the request is complete.

        Args:
            outcome: The next token; for a request that generates nothing, any number that is not negative.
        """


RequestT = TypeVar("RequestT", bound=RequestProgress)
"""The kind of request that an engine serves."""


class RequestTable(Mapping[str, RequestT]):
    """An engine's requests by id.

    Invariant: a request stays in the table until its end is reported or it is removed. The table has all unreported
    requests.

    Attributes:
        unreported: The requests with something to report, by id. The one that has had it for longest is the first.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self.unreported: dict[str, RequestT] = {}
        self._requests: dict[str, RequestT] = {}
        self._samples: dict[str, dict[str, None]] = {}
        self._next_number = itertools.count()

    def fresh_id(self) -> str:
        """Return an id that no request in the table has."""
        return next(name for name in map("req-{}".format, self._next_number) if not self.samples_of(name))

    def samples_of(self, request_id: str) -> list[str]:
        """Return the ids of all samples in the table that belong to one request of the owner."""
        first = [request_id] if request_id in self._requests else []
        return [*first, *self._samples.get(request_id, ())]

    def holds(self, request: RequestT) -> bool:
        """Return whether this request object is in the table, and not another request with the same id."""
        return self._requests.get(request.request_id) is request

    def first_unreported(self, requests: Iterable[RequestT]) -> RequestT | None:
        """Return the first of ``requests`` that has something to report; None if none has."""
        return next((request for request in requests if self.unreported.get(request.request_id) is request), None)

    def add(self, request: RequestT) -> None:
        """Add a request whose id is not in the table."""
        self._requests[request.request_id] = request
        if request.sample:
            self._samples.setdefault(request.asked_id, {})[request.request_id] = None

    def note(self, requests: Iterable[RequestT]) -> None:
        """Record that requests of the table have something to report."""
        self.unreported.update((request.request_id, request) for request in requests)

    def mark_reported(self, request: RequestT) -> None:
        """Record that a request's output goes to its owner; if the request has ended, remove it from the table."""
        self.unreported.pop(request.request_id, None)
        if request.finish_reason is not None:
            self.remove(request.request_id)

    def mark_unreported(self, request: RequestT) -> None:
        """Put a request back whose report did not reach its owner, so that it is reported again."""
        if request.request_id not in self._requests:
            self.add(request)
        if self.holds(request):
            self.note([request])

    def remove(self, request_id: str) -> RequestT | None:
        """Remove a request without a report; return None if it is not in the table."""
        self.unreported.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        if request is not None and request.sample:
            samples = self._samples[request.asked_id]
            del samples[request_id]
            if not samples:
                del self._samples[request.asked_id]
        return request

    def __getitem__(self, request_id: str) -> RequestT:
        return self._requests[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
