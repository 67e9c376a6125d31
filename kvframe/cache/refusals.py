"""What nobody may ask of the cache manager, and what whoever does is told. A call that is refused changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from kvframe.cache.inputs import InputSequence
from kvframe.errors import RequestError


def too_many_tokens(num_tokens: int, most: int) -> RequestError:
    """Return the error of who wants room for more tokens than the block tables have.

    Args:
        num_tokens: The tokens.
        most: The longest request that the plan is for.
    """
    return RequestError(
        f"room for {num_tokens} tokens was asked for, but the plan is for requests of {most} at most; ask for fewer, "
        "or plan with a greater max_model_len",
        code="too_long",
    )


def check_input_lens(inputs: Mapping[str, InputSequence], max_input_lens: Mapping[str, int]) -> None:
    """Refuse inputs that the block tables have no room for.

    Args:
        inputs: A request's inputs, by name.
        max_input_lens: The longest of each that the plan is for.

    Raises:
        RequestError: One is longer.
    """
    for name, given in inputs.items():
        if name in max_input_lens and given.num_tokens > max_input_lens[name]:
            raise RequestError(
                f"the input {name!r} has {given.num_tokens} tokens, but the plan is for {max_input_lens[name]} at "
                f"most; give fewer, or plan with a greater max_input_lens[{name!r}]",
                code="input_too_long",
            )


def name_in_use(request_id: str, is_swapped: bool) -> RequestError:
    """Return the error of who begins a request by a name that another one has."""
    where = "swapped out" if is_swapped else "in the table"
    return RequestError(
        f"a request {request_id!r} is {where} already; free it first, or give the new one another name",
        code="duplicate_id",
    )


def no_free_row(max_num_seqs: int) -> RequestError:
    """Return the error of who wants more requests in the table than it has rows."""
    return RequestError(
        f"no row of the table is free: there are {max_num_seqs}; free a request, swap one out, or ask for a greater "
        "max_num_seqs",
        code="no_row",
    )


def not_in_table(request_id: str, is_swapped: bool) -> RequestError:
    """Return the error of who asks something of a request that is not in the table."""
    where = "it is swapped out; swap it in" if is_swapped else "there is none of that name; start it"
    return RequestError(f"the request {request_id!r} is not in the table: {where}", code="unknown_id")


def unreadable_tokens(request_id: str, why: RequestError) -> RequestError:
    """Return the error of who commits a request some of whose tokens could not be read.

    Args:
        request_id: The request.
        why: Why not.
    """
    return RequestError(
        f"the request {request_id!r} is committed, but no other request finds its tokens from there on: {why}",
        code=why.code,
    )


def not_swapped_out(request_id: str, is_in_table: bool) -> RequestError:
    """Return the error of who swaps in a request that is not swapped out."""
    where = "it is in the table" if is_in_table else "there is none of that name"
    return RequestError(
        f"the request {request_id!r} is not swapped out: {where}; swap in only what 'swap_out' took out",
        code="not_swapped",
    )


def cannot_fork(request_id: str, why: str) -> RequestError:
    """Return the error of who forks a request that cannot be forked.

    Args:
        request_id: The request.
        why: Why not, and what to do.
    """
    return RequestError(f"the request {request_id!r} cannot be forked: {why}", code="no_fork")
