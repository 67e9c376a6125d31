"""Checks the manager's arguments; a wrong one raises an error of one sentence. A refused call changes nothing."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.cache.input_index import InputSequence
from kvframe.contract.errors import RequestError
from kvframe.contract.foreign import safe_repr

_SEQUENCES = frozenset((array, list, tuple))
MAX_SALT_CHARS = 4096
"""The longest salt: it is read whenever a request starts."""


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


def check_count(what: str, given: Any, least: int = 0) -> int:
    """Return a whole number as an ``int``; refuse anything else, and a smaller one than ``least`` (``bad_count``)."""
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < least:
        raise RequestError(f"{what} must be a whole number of at least {least}, not {safe_repr(given)}", "bad_count")
    return int(given)


def check_tokens(token_ids: Any, most: int, least: int = 1) -> None:
    """Refuse what is not a sequence of ``least`` to ``most`` tokens; the tokens themselves are not read.

    Raises:
        RequestError: It is no sequence (``bad_token``), too short (``empty_prompt``) or too long (``too_long``).
    """
    if type(token_ids) not in _SEQUENCES:
        is_sequence = hasattr(token_ids, "__len__") and hasattr(token_ids, "__getitem__")
        if not is_sequence or isinstance(token_ids, str | bytes | Mapping):
            raise RequestError(
                f"the tokens must be a sequence of whole numbers, not {safe_repr(token_ids)}", code="bad_token"
            )
    if len(token_ids) < least:
        raise RequestError("there are no tokens; give at least one", code="empty_prompt")
    if len(token_ids) > most:
        raise too_many_tokens(len(token_ids), most)


def check_inputs(inputs: Mapping[str, InputSequence], max_input_lens: Mapping[str, int]) -> None:
    """Raise for a value that is not a mapping of ``InputSequence`` (``bad_input``), or for inputs that are too long."""
    if not isinstance(inputs, Mapping) or not all(
        isinstance(name, str) and isinstance(given, InputSequence) for name, given in inputs.items()
    ):
        raise RequestError(
            f"inputs must be a mapping of names to InputSequences, not {safe_repr(inputs)}", code="bad_input"
        )
    for name, given in inputs.items():
        if name in max_input_lens and given.num_tokens > max_input_lens[name]:
            raise RequestError(
                f"the input {name!r} has {given.num_tokens} tokens, but the plan is for {max_input_lens[name]} at "
                f"most; give fewer, or plan with a greater max_input_lens[{name!r}]",
                code="input_too_long",
            )


def check_copies(copies: Any, is_needed: Sequence[npt.NDArray[np.bool_]]) -> list[npt.NDArray[np.int64]]:
    """Return the places of a prefix's blocks as arrays; refuse them if a needed block has none (``bad_copies``).

    Args:
        copies: For each group a list of whole numbers, one for each block; 0 for a block without a copy.
        is_needed: Per group ``[num_blocks], bool, host``: the blocks that a request needs to continue.
    """
    try:
        if not all(isinstance(copy, int) for of_group in copies for copy in of_group):
            raise TypeError
        places = [np.array(of_group, dtype=np.int64) for of_group in copies]
        is_right = all((of_group[needed] != 0).all() for of_group, needed in zip(places, is_needed, strict=True))
    except (TypeError, ValueError, IndexError, OverflowError):
        is_right = False
    if not is_right:
        num_blocks = ", ".join(str(len(needed)) for needed in is_needed)
        raise RequestError(
            f"the copies {safe_repr(copies)} are refused: give a list for each group, of {num_blocks} whole numbers, "
            "one for each block, from 1 on for the blocks that a request needs to continue",
            code="bad_copies",
        )
    return places


class TakenRows:
    """Which rows of the tables are those of requests, and whether a caller names such rows.

    Attributes:
        num_rows: How many rows there are.
    """

    def __init__(self, num_rows: int) -> None:
        """Start with every row free."""
        self.num_rows = num_rows
        self._is_taken = np.zeros(num_rows, dtype=np.int64)
        # Single numbers are written several times as fast in this.
        self._taken = self._is_taken.data
        # A host names the same rows in most steps: they need not be counted again until a row is taken or freed.
        self._checked: tuple[Any, bytes] | None = None

    def take(self, row: int) -> None:
        """Let a free row be that of a request."""
        self._taken[row], self._checked = 1, None

    def free(self, row: int) -> None:
        """Let a row be free."""
        self._taken[row], self._checked = 0, None

    def check(self, rows: Any, counts: Any) -> None:
        """Refuse rows that are not those of requests, each once, with one count for each (``bad_rows``).

        Args:
            rows: ``[n], int64, host``.
            counts: ``[n], int64, host``.
        """
        try:
            named = rows.dtype, rows.tobytes()
            is_right = rows.ndim == counts.ndim == 1 and len(rows) == len(counts) and counts.dtype.kind == "i"
            if is_right and named != self._checked:
                is_right = not np.count_nonzero(np.bincount(rows, minlength=self.num_rows) > self._is_taken)
                self._checked = named if is_right else None
        except (AttributeError, TypeError, ValueError, MemoryError):  # no arrays, no whole numbers, or too large ones
            is_right = False
        if not is_right:
            raise RequestError(
                f"the rows {safe_repr(rows)} with {safe_repr(counts)} tokens are refused: give int64 arrays of one "
                f"length, each row of a request in the table once, as 'row' says it; there are {self.num_rows} rows",
                code="bad_rows",
            )


# --- errors -----------------------------------------------------------------------------------------------------------


def not_computable(num_computed: int, num_allocated: int) -> RequestError:
    """Return the error of a commit of more tokens than blocks were allocated for."""
    return RequestError(
        f"{num_computed} computed tokens are committed of a request that has room for {num_allocated}; extend it "
        "before its tokens are computed",
        code="no_room_made",
    )


def too_many_tokens(num_tokens: int, most: int) -> RequestError:
    """Return the error of a request for more tokens than the plan's longest request has."""
    return RequestError(
        f"room for {safe_repr(num_tokens)} tokens was asked for, but the plan is for requests of {most} at most; "
        "ask for fewer, or plan with a greater max_model_len",
        code="too_long",
    )


def name_in_use(request_id: str, is_swapped: bool) -> RequestError:
    """Return the error of a new request with the name of another one."""
    where = "swapped out" if is_swapped else "in the table"
    return RequestError(
        f"a request {request_id!r} is {where} already; free it first, or give the new one another name",
        code="duplicate_id",
    )


def no_free_row(max_num_seqs: int) -> RequestError:
    """Return the error of a new request when the table is full."""
    return RequestError(
        f"no row of the table is free: there are {max_num_seqs}; free a request, swap one out, or ask for a greater "
        "max_num_seqs",
        code="no_row",
    )


def not_in_table(request_id: str, is_swapped: bool) -> RequestError:
    """Return the error of a verb on a request that is not in the table."""
    where = "it is swapped out; swap it in" if is_swapped else "there is none of that name; start it"
    return RequestError(f"the request {request_id!r} is not in the table: {where}", code="unknown_id")


def not_swapped_out(request_id: str, is_in_table: bool) -> RequestError:
    """Return the error of swapping in a request that is not swapped out."""
    where = "it is in the table" if is_in_table else "there is none of that name"
    return RequestError(
        f"the request {request_id!r} is not swapped out: {where}; swap in only what 'swap_out' took out",
        code="not_swapped",
    )


def cannot_fork(request_id: str, why: str) -> RequestError:
    """Return the error of forking a request that cannot be forked, for a reason that says what to do."""
    return RequestError(f"the request {request_id!r} cannot be forked: {why}", code="no_fork")


def unreadable_tokens(request_id: str, why: RequestError) -> RequestError:
    """Return the error of a commit of tokens that could not be read, and so not be published."""
    return RequestError(
        f"the request {request_id!r} is committed, but no other request finds its tokens from there on: {why}",
        code=why.code,
    )
