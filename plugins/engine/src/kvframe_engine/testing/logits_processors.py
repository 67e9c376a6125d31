"""The laws of logits processors."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from kvframe_testing.checks import Check, Checks
from kvframe_testing.laws import ConformanceError

from kvframe.contract.errors import PluginError, RequestError
from kvframe.contract.foreign import call
from kvframe_engine.contract.logits import LogitsProcessor, ProcessedRequest, Vocabulary

NUM_STEPS = 12
"""The most tokens of each answer of a check."""
NUM_DRAFTS = 3
_PROMPTS = ((1,), (1, 2, 3, 4), (3, 1, 2))


def check_logits_processor(
    processor_class: type[LogitsProcessor], vocabulary: Vocabulary, options: Mapping[str, Any]
) -> None:
    """Check a processor in steps of several requests, whose tokens are sampled from what it leaves.

    * *form*: it returns nothing, leaves a token in each row of a request until the request ends, and no NaN;
    * *reading*: it changes neither the requests' tokens nor the options;
    * *alone*: a request gets the same logits alone and beside others;
    * *drafts*: the rows of drafts are those of a request that has these tokens, up to the first draft that is banned or
      ends the request; a rejected draft changes nothing;
    * *several*: tokens that come in one step are read as if each had come in a step of its own.

    Raises:
        ConformanceError: A law does not hold; the error is about the first one.
    """
    check = _Laws(processor_class, vocabulary, options)
    answers = check.alone()
    check.together(answers)
    check.drafts(answers)
    check.several(answers)


def logits_processor_checks(
    processor_class: type[LogitsProcessor], options: Mapping[str, Any] | None = None, *, name: str = ""
) -> Checks:
    """Return the checks of a processor, with a vocabulary of 256 bytes and an end token.

    Args:
        processor_class: The processor.
        options: The options of a request; none unless given.
        name: Its registered name; its own unless given.

    Raises:
        ConformanceError: It refuses these options.
    """
    part = f"logits processor {name or processor_class.name!r}"
    vocabulary = Vocabulary(size=257, eos_token_ids=frozenset({256}), tokenizer_json=byte_tokenizer_json())
    try:
        call(part, lambda: processor_class(vocabulary).start(dict(options or {})), passes=(RequestError,))
    except RequestError as error:
        raise ConformanceError(f"{part} refuses the options {options or {}}: {error}; give other options") from error
    except PluginError:
        pass  # the check fails, and says what it raised
    check = Check(
        name="laws",
        features=("logits of requests alone, together and with drafts",),
        run=partial(check_logits_processor, processor_class, vocabulary, dict(options or {})),
    )
    return Checks(part=part, checks=(check,))


def byte_tokenizer_json() -> str:
    """Return a tokenizer whose tokens are the 256 bytes, then ``</s>``, as the library ``tokenizers`` reads it."""
    import json

    letters = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in letters]
    # GPT-2's letters for bytes: printable ones stand for themselves.
    letter_of = {byte: chr(byte) for byte in letters} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": 256, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{**end, "normalized": False, "special": True}],
            "pre_tokenizer": level,
            "decoder": level,
            "model": {"type": "BPE", "vocab": {letter_of[byte]: byte for byte in range(256)}, "merges": []},
        }
    )


class _Laws:
    """Compares what a processor does with the same requests in different steps."""

    def __init__(
        self, processor_class: type[LogitsProcessor], vocabulary: Vocabulary, options: Mapping[str, Any]
    ) -> None:
        self._name = f"logits processor {processor_class.__qualname__}"
        self._vocabulary = vocabulary
        self._options, self._given = options, repr(options)
        try:
            self._processor = call(f"{self._name}: __init__()", processor_class, vocabulary, passes=(RequestError,))
        except (PluginError, RequestError) as error:
            raise ConformanceError(f"{self._name} cannot be made: {error}") from error

    def alone(self) -> list[list[int]]:
        """Return the answer of each prompt, token by token."""
        answers = []
        for index, prompt in enumerate(_PROMPTS):
            chosen, state = random.Random(index), self._start()
            answer: list[int] = []
            while len(answer) < NUM_STEPS and not self._vocabulary.eos_token_ids & {*answer}:
                (row,) = self._process([(prompt, answer, (), state)])
                allowed_ids = torch.isfinite(row[: self._vocabulary.size]).nonzero().flatten().tolist()
                if row.isnan().any() or not allowed_ids:
                    raise ConformanceError(f"{self._name}: after the answer {answer}, it leaves no token, or NaN")
                answer.append(chosen.choice(allowed_ids))
            answers.append(answer)
        return answers

    def together(self, answers: Sequence[Sequence[int]]) -> None:
        """Compare the rows of requests alone and in one step."""
        states = [self._start() for _ in answers]
        others = [self._start() for _ in answers]
        for length in range(min(map(len, answers))):
            requests = [(prompt, answer[:length], ()) for prompt, answer in zip(_PROMPTS, answers, strict=True)]
            rows = self._process([(*request, state) for request, state in zip(requests, states, strict=True)])
            for index, request in enumerate(requests):
                (alone,) = self._process([(*request, others[index])])
                self._compare(rows[index], alone, f"beside other requests, after the answer {request[1]}")

    def drafts(self, answers: Sequence[Sequence[int]]) -> None:
        """Compare the rows of drafts with those of the same tokens in an answer; right drafts and wrong ones."""
        for prompt, answer in zip(_PROMPTS, answers, strict=True):
            state = self._start()
            for length in range(len(answer)):
                right = list(answer[length : length + NUM_DRAFTS])
                wrong = [*right[:1], (right[-1] + 1) % self._vocabulary.size, right[0]]
                for drafts in (right, wrong):
                    rows = self._process([(prompt, answer[:length], drafts, state)])
                    for index, row in enumerate(rows):
                        other = self._start()
                        (alone,) = self._process([(prompt, [*answer[:length], *drafts[:index]], (), other)])
                        self._compare(row, alone, f"after the answer {answer[:length]} and the drafts {drafts[:index]}")
                        if self._ends(drafts[index : index + 1], alone):
                            break

    def _ends(self, draft: Sequence[int], row: torch.Tensor) -> bool:
        """Return whether rows after a draft are not read: it ends the request, or is banned, or is the last."""
        return not draft or draft[0] in self._vocabulary.eos_token_ids or not bool(torch.isfinite(row[draft[0]]))

    def several(self, answers: Sequence[Sequence[int]]) -> None:
        """Compare an answer that is read at once with one that came token by token."""
        for prompt, answer in zip(_PROMPTS, answers, strict=True):
            state = self._start()
            for length in range(0, len(answer), 2):
                (row,) = self._process([(prompt, answer[:length], (), state)])
                (once,) = self._process([(prompt, answer[:length], (), self._start())])
                self._compare(row, once, f"if the answer {answer[:length]} is read at once")

    def _start(self) -> Any:
        try:
            state = call(f"{self._name}: start()", self._processor.start, self._options, passes=(RequestError,))
        except (PluginError, RequestError) as error:
            raise ConformanceError(f"{self._name} refuses the options {self._options}: {error}") from error
        if repr(self._options) != self._given:
            raise ConformanceError(f"{self._name}: start() changed the options of a request")
        return state

    def _process(
        self, parts: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int], Any]]
    ) -> tuple[torch.Tensor, ...]:
        """Return the rows of one step, of logits that differ from column to column."""
        num_rows = sum(1 + len(drafts) for *_, drafts, _ in parts)
        logits = torch.linspace(-1, 1, self._vocabulary.size).repeat(num_rows, 1)
        requests = [
            ProcessedRequest(array("I", [*prompt, *answer]), len(prompt), list(drafts), state)
            for prompt, answer, drafts, state in parts
        ]
        before = [list(request.token_ids) for request in requests]
        try:
            answered: Any = call(f"{self._name}: process()", self._processor.process, logits, requests)
        except PluginError as error:
            raise ConformanceError(str(error)) from error
        if answered is not None:
            raise ConformanceError(f"{self._name}: process() changes logits in place, and returns nothing")
        if before != [list(request.token_ids) for request in requests]:
            raise ConformanceError(f"{self._name}: process() changed the tokens of a request")
        return logits.unbind()

    def _compare(self, row: torch.Tensor, other: torch.Tensor, where: str) -> None:
        if not torch.equal(row.nan_to_num(), other.nan_to_num()):
            token = int((row.nan_to_num() != other.nan_to_num()).nonzero()[0])
            raise ConformanceError(
                f"{self._name}: {where}, the logit of token {token} is {row[token]:g}, and otherwise {other[token]:g}"
            )
