"""The laws of proposers of draft tokens. Imports no torch."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvframe_testing.checks import Check, Checks, make_part
from kvframe_testing.laws import ConformanceError

from kvframe.contract.errors import PluginError
from kvframe.contract.foreign import call, safe_repr
from kvframe_engine.contract.proposer import DraftRequest, Proposer

NUM_STEPS = 60
"""Steps of a check."""
NUM_DRAFTS = (1, 5)
"""The most drafts of a request, besides the proposer's default."""
_VOCABULARY = 8
"""Few tokens, so that the same tokens occur again and again."""


HiddenStates = Callable[[int], Any]
"""Makes ``[num_rows, hidden_size]`` for a number of rows, the same rows for the same number."""


def check_proposer(make: Callable[[], Proposer], *, hidden_states: HiddenStates | None = None) -> None:
    """Check a proposer's answers in steps of several requests, which grow by any number of tokens, and end.

    * *form*: ``propose`` returns a list for each request, in their order, of at most ``max_drafts`` whole numbers that
      are not negative; it raises nothing, for prompts of any length, and with or without tokens of its draft model;
    * *reading*: it does not change the requests' tokens;
    * *alone*: with requests of other salts beside it, a request gets the same drafts as without them;
    * *ends*: ``forget`` accepts requests that it knows, and requests that it was never asked about.

    Args:
        make: Makes a proposer that knows no request.
        hidden_states: Makes the hidden states of the tokens that a request got since the last step; None for none.

    Raises:
        ConformanceError: A law does not hold; the error is about the first one.
    """
    own = _steps(make(), hidden_states, others=False)
    beside = _steps(make(), hidden_states, others=True)
    for step, (alone, together) in enumerate(zip(own, beside, strict=True)):
        if alone != together:
            raise ConformanceError(
                f"{_name(make())}: in step {step} the drafts of a request depend on requests of another salt: "
                f"{alone} without them, {together} with them"
            )


def proposer_checks(
    proposer_class: type[Proposer], options: Mapping[str, Any] | None = None, *, name: str = ""
) -> Checks:
    """Return the checks of a proposer, for several numbers of drafts.

    Args:
        proposer_class: The proposer.
        options: Its options; none unless given.
        name: Its registered name; its own unless given.

    Raises:
        ConformanceError: It cannot be made with these options.
    """
    part = f"proposer {name or proposer_class.name!r}"
    options_given = dict(options or {})
    variants = {"as given": options_given}
    if "max_drafts" not in options_given:
        variants |= {f"max_drafts={most}": {**options_given, "max_drafts": most} for most in NUM_DRAFTS}
    for variant in variants.values():
        make_part(part, proposer_class, variant)
    checks = [
        Check(
            name=label.replace(" ", "_"),
            features=(f"drafts, {label}",),
            run=partial(check_proposer, partial(make_part, part, proposer_class, variant)),
        )
        for label, variant in variants.items()
    ]
    return Checks(part=part, checks=tuple(checks))


def _steps(proposer: Proposer, hidden_states: HiddenStates | None, *, others: bool) -> list[list[list[int]]]:
    """Return the drafts of the requests of one salt, step by step; with others of a second salt beside them or not."""
    chosen, noise = random.Random(0), random.Random(1)
    lengths = {"short": 1, "long": 700, "middle": 40}
    tokens = {name: _draw(chosen, count) for name, count in lengths.items()}
    beside = {name: _draw(noise, count) for name, count in lengths.items()} if others else {}
    grown: dict[str, int] = {}
    steps_drafts = []

    def rows_of(name: str) -> Any:
        return None if hidden_states is None or not grown.get(name) else hidden_states(grown[name])

    for step in range(NUM_STEPS):
        max_drafts = 1 + step % proposer.max_drafts
        # A host that runs no draft model gives no tokens of it.
        continues = step % 3 > 0 and _draft_model(proposer) is not None
        ours = [
            DraftRequest(
                name,
                tokens[name],
                lengths[name],
                max_drafts,
                "ours",
                _draw(chosen, max_drafts) if continues else (),
                rows_of(name),
            )
            for name in tokens
            if (step + len(name)) % 5  # a request may be missing in a step
        ]
        theirs = [
            DraftRequest(f"other {name}", token_ids, lengths[name], proposer.max_drafts, "theirs")
            for name, token_ids in beside.items()
        ]
        drafts = _propose(proposer, [*theirs, *ours])
        steps_drafts.append(drafts[len(theirs) :])
        for name, token_ids in tokens.items():
            grown[name] = chosen.randrange(4)
            token_ids.extend(_draw(chosen, grown[name]))
        for token_ids in beside.values():
            token_ids.extend(_draw(noise, noise.randrange(4)))
        if step == NUM_STEPS // 2:
            _forget(proposer, ["middle", "never asked about"])
            tokens["middle again"] = tokens.pop("middle")
            lengths["middle again"] = lengths["middle"]
    return steps_drafts


def _draft_model(proposer: Proposer) -> str | None:
    name = _name(proposer)
    try:
        path: Any = call(f"{name}: draft_model()", proposer.draft_model)
    except PluginError as error:
        raise ConformanceError(str(error)) from error
    if path is not None and not (isinstance(path, str) and path):
        raise ConformanceError(f"{name}: draft_model() returned {safe_repr(path)}; return a path as a str, or None")
    return path


def _propose(proposer: Proposer, requests: Sequence[DraftRequest]) -> list[list[int]]:
    name, before = _name(proposer), [list(request.token_ids) for request in requests]
    try:
        answer = call(f"{name}: propose()", partial(proposer.propose, requests))
    except PluginError as error:
        raise ConformanceError(str(error)) from error
    if before != [list(request.token_ids) for request in requests]:
        raise ConformanceError(f"{name}: propose() changed the tokens of a request")
    if not hasattr(answer, "__len__") or len(answer) != len(requests):
        raise ConformanceError(
            f"{name}: propose() returned {safe_repr(answer)} for {len(requests)} requests; return a list for each"
        )
    for request, drafts in zip(requests, answer, strict=True):
        is_right = isinstance(drafts, list | tuple) and len(drafts) <= request.max_drafts
        if not is_right or not all(type(token) is int and token >= 0 for token in drafts):
            raise ConformanceError(
                f"{name}: propose() returned {safe_repr(drafts)} for a request with max_drafts "
                f"{request.max_drafts}; return at most so many token ids, as a list of int"
            )
    return [list(request) for request in answer]


def _forget(proposer: Proposer, request_ids: Sequence[str]) -> None:
    try:
        call(f"{_name(proposer)}: forget()", partial(proposer.forget, request_ids))
    except PluginError as error:
        raise ConformanceError(str(error)) from error


def _draw(source: random.Random, count: int) -> array[int]:
    return array("I", [source.randrange(_VOCABULARY) for _ in range(count)])


def _name(proposer: Proposer) -> str:
    return f"proposer {type(proposer).__qualname__}"
