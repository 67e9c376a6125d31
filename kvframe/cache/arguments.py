"""Checks the manager's arguments; a wrong one raises an error of one sentence. A refused call changes nothing."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.cache.input_index import InputSequence
from kvframe.contract.errors import RequestError
from kvframe.contract.foreign import safe_repr

_SEQUENCES = frozenset((array, list, tuple))
SECRET_BYTES = 32
MAX_SALT_CHARS = 4096
"""The longest salt: it is read whenever a request starts."""


def check_secret(secret: object) -> None:
    """Refuse a secret of keys that is not 32 bytes."""
    if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
        raise RequestError(f"the secret must be {SECRET_BYTES} bytes, not {safe_repr(secret)}", code="bad_secret")


def check_salt(salt: object) -> None:
    """Refuse a salt that is not Unicode text, or is too long, with a ``RequestError`` (``bad_salt``)."""
    if type(salt) is str and not salt:
        return
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a string, not {safe_repr(salt)}", code="bad_salt")
    if len(salt) > MAX_SALT_CHARS:
        raise RequestError(
            f"cache_salt has {len(salt):,} characters, and may have {MAX_SALT_CHARS:,}; give a hash of it",
            code="bad_salt",
        )
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"cache_salt is not Unicode text: {error.reason}", code="bad_salt") from error


def check_name(request_id: object) -> None:
    """Refuse a request's name that is not a string (``bad_id``)."""
    if not isinstance(request_id, str):
        raise RequestError(f"a request's name is a string, not {safe_repr(request_id)}", code="bad_id")


def check_count(name: str, value: Any, minimum: int = 0) -> int:
    """Return a whole number as an ``int``; refuse any other value, and one below ``minimum`` (``bad_count``)."""
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_number or value < minimum:
        raise RequestError(f"{name} must be a whole number of at least {minimum}, not {safe_repr(value)}", "bad_count")
    return int(value)


def check_num_tokens(num_tokens: Any, max_tokens: int) -> None:
    """Refuse a number of first tokens that is not a whole number (``bad_count``), or is too large (``too_long``)."""
    if check_count("num_tokens", num_tokens) > max_tokens:
        raise too_many_tokens(num_tokens, max_tokens)


def check_sequence(token_ids: Any) -> None:
    """Refuse tokens that are no sequence (``bad_token``)."""
    if type(token_ids) not in _SEQUENCES:
        is_sequence = hasattr(token_ids, "__len__") and hasattr(token_ids, "__getitem__")
        if not is_sequence or isinstance(token_ids, str | bytes | Mapping):
            raise RequestError(
                f"the tokens must be a sequence of whole numbers, not {safe_repr(token_ids)}", code="bad_token"
            )


def check_tokens(token_ids: Any, max_tokens: int, min_tokens: int = 1) -> None:
    """Refuse a value that is no sequence (``bad_token``), is too short (``empty_prompt``) or too long."""
    check_sequence(token_ids)
    if len(token_ids) < min_tokens:
        raise RequestError("there are no tokens; give at least one", code="empty_prompt")
    if len(token_ids) > max_tokens:
        raise too_many_tokens(len(token_ids), max_tokens)


def check_inputs(inputs: Mapping[str, InputSequence], max_input_lens: Mapping[str, int]) -> None:
    """Raise for a value that is not a mapping of ``InputSequence`` (``bad_input``), or for inputs that are too long."""
    if not isinstance(inputs, Mapping) or not all(
        isinstance(name, str) and isinstance(sequence, InputSequence) for name, sequence in inputs.items()
    ):
        raise RequestError(
            f"inputs must be a mapping of names to InputSequences, not {safe_repr(inputs)}", code="bad_input"
        )
    for name, sequence in inputs.items():
        if name in max_input_lens and sequence.num_tokens > max_input_lens[name]:
            raise RequestError(
                f"the input {name!r} has {sequence.num_tokens} tokens, but the plan is for {max_input_lens[name]} at "
                f"most; give fewer, or plan with a greater max_input_lens[{name!r}]",
                code="input_too_long",
            )


def check_block_ids(block_ids: Any, num_ids: int) -> npt.NDArray[np.int32]:
    """Return block ids, each below ``num_ids``, as an array; refuse what is not a sequence of such numbers."""
    check_sequence(block_ids)
    try:
        array = np.array(block_ids) if len(block_ids) else np.zeros(0, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        array = np.zeros((0, 0))
    is_right = array.ndim == 1 and array.dtype.kind in "iu"
    if not is_right or (array < 0).any() or (array >= num_ids).any():
        raise RequestError(f"block ids must be whole numbers from 0 to {num_ids - 1}", code="bad_blocks")
    return array.astype(np.int32)


def too_many_tokens(num_tokens: int, max_tokens: int) -> RequestError:
    """Return the error of a request for more tokens than the plan's longest request has (``too_long``)."""
    return RequestError(
        f"blocks for {safe_repr(num_tokens)} tokens were asked for, but the plan is for requests of {max_tokens} at "
        "most; ask for fewer, or plan with a greater max_model_len",
        code="too_long",
    )
