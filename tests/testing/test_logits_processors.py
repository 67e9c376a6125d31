"""Wrong logits processors that the kit finds, each by the law that it breaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from kvframe_engine.contract import LogitsProcessor, ProcessedRequest, Vocabulary
from kvframe_engine.testing.logits_processors import (
    byte_tokenizer_json,
    check_logits_processor,
    logits_processor_checks,
)
from kvframe_testing.laws import ConformanceError
from tokenizers import Tokenizer

from kvframe.contract import RequestError

VOCABULARY = Vocabulary(size=9, eos_token_ids=frozenset({8}))


class Less(LogitsProcessor):
    """Makes tokens less likely each time that they were generated."""

    name: ClassVar[str] = "less"

    def start(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if options.keys() - {"by"}:
            raise RequestError("less takes by", code="bad_params")
        return {"by": options.get("by", 1.0)}

    def process(self, logits: torch.Tensor, requests: Sequence[ProcessedRequest]) -> Any:
        row = 0
        for request in requests:
            output = list(request.token_ids[request.num_prompt_tokens :])
            for count in range(1 + len(request.drafts)):
                self.change(logits[row], [*output, *request.drafts[:count]], request)
                row += 1
        return None

    def change(self, logits: torch.Tensor, output: Sequence[int], request: ProcessedRequest) -> None:
        for token in output:
            logits[token] -= request.state["by"]


def test_a_right_processor_passes() -> None:
    check_logits_processor(Less, VOCABULARY, {"by": 0.5})
    assert ["laws"] == [check.name for check in logits_processor_checks(Less).checks]
    logits_processor_checks(Less).checks[0].run()


def test_the_tokenizer_of_the_kit_reads_every_text() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer_json())
    text = "A b\n\x00é 日本 🙂"
    assert list(text.encode()) == tokenizer.encode(text).ids
    assert text == tokenizer.decode(list(text.encode()))
    assert 256 == tokenizer.token_to_id("</s>")


class Raises(Less):
    def process(self, logits: torch.Tensor, requests: Sequence[ProcessedRequest]) -> None:
        raise ValueError("no")


class Returns(Less):
    def process(self, logits: torch.Tensor, requests: Sequence[ProcessedRequest]) -> Any:
        return logits * 2


class BansAll(Less):
    def change(self, logits: torch.Tensor, output: Sequence[int], request: ProcessedRequest) -> None:
        if output:
            logits.fill_(-torch.inf)


class SpoilsOne(Less):
    def change(self, logits: torch.Tensor, output: Sequence[int], request: ProcessedRequest) -> None:
        logits[0] = torch.nan


class WritesTokens(Less):
    def change(self, logits: torch.Tensor, output: Sequence[int], request: ProcessedRequest) -> None:
        request.token_ids[0] = 5  # type: ignore[index]


class ReadsOthers(Less):
    def process(self, logits: torch.Tensor, requests: Sequence[ProcessedRequest]) -> None:
        logits[:, 0] -= len(requests)


class IgnoresDrafts(Less):
    def change(self, logits: torch.Tensor, output: Sequence[int], request: ProcessedRequest) -> None:
        super().change(logits, request.token_ids[request.num_prompt_tokens :], request)


class KeepsDrafts(Less):
    """Does not go back after a draft was rejected."""

    def change(self, logits: torch.Tensor, output: Sequence[int], request: ProcessedRequest) -> None:
        tokens = request.state.setdefault("seen", set())
        tokens |= {*output}
        for token in tokens:
            logits[token] -= 1


class CountsSteps(Less):
    """Reads one token a step."""

    def process(self, logits: torch.Tensor, requests: Sequence[ProcessedRequest]) -> None:
        row = 0
        for request in requests:
            request.state["steps"] = request.state.get("steps", -1) + 1
            logits[row : row + 1 + len(request.drafts), 0] -= request.state["steps"]
            row += 1 + len(request.drafts)


class ChangesOptions(Less):
    def start(self, options: Mapping[str, Any]) -> dict[str, Any]:
        options["by"] = 2.0  # type: ignore[index]
        return {"by": 2.0}


class NeedsMore(Less):
    def __init__(self, vocabulary: Vocabulary) -> None:
        raise RequestError("it needs a tokenizer", code="bad_params")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Raises, r"process\(\) failed: ValueError: no"),
        (Returns, "changes logits in place, and returns nothing"),
        (BansAll, "leaves no token, or NaN"),
        (SpoilsOne, "leaves no token, or NaN"),
        (WritesTokens, "changed the tokens of a request"),
        (ReadsOthers, "beside other requests"),
        (IgnoresDrafts, "and the drafts"),
        (KeepsDrafts, "the logit of token"),
        (CountsSteps, "the logit of token"),
        (ChangesOptions, "changed the options of a request"),
        (NeedsMore, "cannot be made: it needs a tokenizer"),
    ],
)
def test_a_wrong_processor_is_found(wrong: type[LogitsProcessor], says: str) -> None:
    with pytest.raises(ConformanceError, match=says):
        check_logits_processor(wrong, VOCABULARY, {"by": 0.5})


def test_options_that_are_refused_are_named() -> None:
    with pytest.raises(ConformanceError, match=r"refuses the options \{'other': 1\}: less takes by"):
        check_logits_processor(Less, VOCABULARY, {"other": 1})
    with pytest.raises(ConformanceError, match=r"^logits processor 'less' refuses .*: less takes by.*; give other opt"):
        logits_processor_checks(Less, {"other": 1})
