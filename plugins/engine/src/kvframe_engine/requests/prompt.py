"""Prompts, alone and in batches, and the parameters, salts, owners and hints of each of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import attrs

from kvframe import Hints
from kvframe.contract.errors import RequestError, shown
from kvframe_engine.requests.params import SamplingParams, bad_params


@attrs.frozen(kw_only=True, eq=False)
class Prompt:
    """A prompt of two parts, for a model with an encoder; or a prompt whose common beginnings are named.

    A prompt that is only text or ids goes to the encoder, if the model has one.

    Attributes:
        encoder: The encoder's input: text, token ids, or features as a tensor or an array, depending on the model; None
            for no input, if the model allows that.
        decoder: The tokens that are to be continued: text, which is put after the model's start tokens, or ids, which
            are used unchanged. The model's start tokens unless given. For a model without an encoder, the prompt.
        boundaries: Numbers of the prompt's first tokens that other prompts begin with too, such as a system prompt's
            length. Layers that keep states at few places keep one at the last whole blocks before each of them, so that
            the next request finds it.
    """

    encoder: Any = None
    decoder: str | Sequence[int] | None = None
    boundaries: Sequence[int] = ()


AnyPrompt = str | Sequence[int] | Prompt | Any
"""Text; token ids, also as an array, a tensor, or what a tokenizer returned for one text; or a prompt of two parts."""

IDS, SHOWN = "input_ids", "attention_mask"
"""The keys of what a tokenizer of transformers returns: token ids, and which of them are no padding."""


def prompts_of(prompts: Any) -> list[Any]:
    """Return the prompts of a batch; they are not checked yet.

    Args:
        prompts: A list of prompts, an array or a tensor of one row for each, or what a tokenizer returned.

    Raises:
        RequestError: ``prompts`` is not a batch, but for example a single prompt or a set (``bad_prompts``).
    """
    if isinstance(prompts, Mapping) and IDS in prompts:
        return _rows_of(prompts)
    if not isinstance(prompts, Iterable) or isinstance(prompts, str | bytes | bytearray | Set | Mapping):
        raise RequestError(f"prompts must be a list of prompts, not {shown(prompts)}", code="bad_prompts")
    return list(prompts)


def unpacked(prompt: Any) -> Any:
    """Return a prompt as a list of token ids if it is what a tokenizer returned, or an array or a tensor of integers.

    Raises:
        RequestError: A tokenizer returned several texts, or its mask does not fit (``bad_token``).
    """
    if isinstance(prompt, Mapping) and IDS in prompt:
        rows = _rows_of(prompt)
        if len(rows) != 1:
            raise RequestError(f"one prompt is needed, and {IDS} has {len(rows)}", code="bad_token")
        return rows[0]
    try:
        if "int" not in str(prompt.dtype):
            return prompt
        numbers = prompt.tolist()
        return numbers[0] if len(prompt.shape) == 2 and len(numbers) == 1 else numbers
    except Exception:  # no array; or a foreign one, which may raise anything
        return prompt


def _rows_of(encoding: Mapping[str, Any]) -> list[list[Any]]:
    """Return the token ids of each text of a tokenizer's output, without padding."""
    ids, mask = (_as_rows(encoding.get(key)) for key in (IDS, SHOWN))
    if mask is None:
        return ids or []
    if ids is None or [len(row) for row in ids] != [len(row) for row in mask]:
        raise RequestError(f"{SHOWN} has another shape than {IDS}", code="bad_token")
    return [[token for token, is_shown in zip(*pair, strict=True) if is_shown] for pair in zip(ids, mask, strict=True)]


def _as_rows(values: Any) -> list[list[Any]] | None:
    if values is None:
        return None
    try:
        listed = values.tolist() if hasattr(values, "tolist") else [*values]
        is_flat = not listed or not hasattr(listed[0], "__len__")
        return [listed] if is_flat else [row.tolist() if hasattr(row, "tolist") else [*row] for row in listed]
    except Exception as error:  # a foreign sequence may raise anything
        raise RequestError(f"{IDS} and {SHOWN} are lists of whole numbers", code="bad_token") from error


# --- what comes with prompts ------------------------------------------------------------------------------------------


def params_for_each(params: Any, num_requests: int) -> Sequence[Any]:
    """Return the parameters of each request of a batch; they are not checked yet.

    Args:
        params: One value for all requests, or a sequence with one for each; None for the default.
        num_requests: The number of requests.

    Raises:
        RequestError: ``params`` is neither, or the sequence has another length (``bad_params``).
    """
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_requests
    if not isinstance(params, Sequence) or isinstance(params, str | bytes | bytearray):
        raise bad_params(f"params must be a SamplingParams, or one for each prompt in a list, not {shown(params)}")
    if len(params) != num_requests:
        raise bad_params(f"{num_requests} prompts have {len(params)} params")
    return params


def salt_of_each(cache_salt: str | Sequence[str], num_requests: int) -> Sequence[str]:
    """Return a salt for each request of a batch.

    Args:
        cache_salt: One for all, or one for each.
        num_requests: The number of requests.

    Raises:
        RequestError: There are more or fewer salts than requests (``bad_salt``).
    """
    return _one_for_each(cache_salt, num_requests, "cache_salt", "bad_salt")


def owner_of_each(owner: str | Sequence[str], num_requests: int) -> Sequence[str]:
    """Return an owner for each request of a batch, as ``salt_of_each`` returns salts (``bad_owner``)."""
    return _one_for_each(owner, num_requests, "owner", "bad_owner")


def _one_for_each(values: str | Sequence[str], num_requests: int, name: str, code: str) -> Sequence[str]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        return [values] * num_requests
    if len(values) != num_requests:
        raise RequestError(f"{num_requests} requests have {len(values)} values of {name}", code=code)
    return values


def hints_of_each(hints: Any, num_requests: int) -> Sequence[Any]:
    """Return the hints of each request of a batch; they are not checked yet.

    Args:
        hints: One value for all requests, or a sequence with one for each; None for none.
        num_requests: The number of requests.

    Raises:
        RequestError: ``hints`` is neither, or the sequence has another length (``bad_hints``).
    """
    if hints is None or isinstance(hints, Hints):
        return [hints] * num_requests
    if not isinstance(hints, Sequence) or isinstance(hints, str | bytes | bytearray):
        raise _bad_hints(f"hints must be a Hints, or one for each prompt in a list, not {shown(hints)}")
    if len(hints) != num_requests:
        raise _bad_hints(f"{num_requests} prompts have {len(hints)} hints")
    return hints


def _bad_hints(message: str) -> RequestError:
    return RequestError(message, code="bad_hints")
