"""Splits a step's requests into virtual ones at the ends of chunks: index arithmetic without a loop over requests."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@attrs.frozen(eq=False)
class VirtualRequests:
    """Virtual requests, each with new tokens of one chunk, in the order of the packed batch.

    Attributes:
        requests: ``[num_virtual]``: the row of the batch.
        chunk_starts: ``[num_virtual]``: the position of the chunk's first token.
        seq_ends: ``[num_virtual]``: the position after the last token that it reads.
        query_start_loc: ``[num_virtual + 1]``: the start of each virtual request's tokens in the packed batch.
        one_each: Whether each is a whole request of the batch.
    """

    requests: IntArray
    chunk_starts: IntArray
    seq_ends: IntArray
    query_start_loc: IntArray
    one_each: bool

    @property
    def max_query_len(self) -> int:
        """The most tokens of a virtual request."""
        return int((self.query_start_loc[1:] - self.query_start_loc[:-1]).max())


def make_virtual_requests(query_start_loc: IntArray, seq_lens: IntArray, chunk: int) -> VirtualRequests:
    """Return a step's virtual requests.

    A request without a new token has none; a step without any new token has one, without tokens.

    Args:
        query_start_loc: ``[num_reqs + 1]``: the start of each request's new tokens.
        seq_lens: ``[num_reqs]``: tokens of each request after the step.
        chunk: Tokens of a chunk.
    """
    num_new = query_start_loc[1:] - query_start_loc[:-1]
    first_chunks = (seq_lens - num_new) // chunk
    counts = ((seq_lens - 1) // chunk + 1 - first_chunks) * (num_new > 0)
    requests = np.arange(len(seq_lens), dtype=np.int32)
    if (counts == 1).all():
        return VirtualRequests(requests, first_chunks * chunk, seq_lens, query_start_loc, one_each=True)
    stops = counts.cumsum(dtype=np.int32)
    num_virtual = stops[-1]
    if num_virtual == 0:
        nothing = np.zeros(1, dtype=np.int32)
        return VirtualRequests(nothing, nothing, nothing, np.zeros(2, dtype=np.int32), one_each=False)
    chunks = np.arange(num_virtual, dtype=np.int32) + (first_chunks - stops + counts).repeat(counts)
    chunk_starts = chunks * chunk
    seq_ends = np.minimum(chunk_starts + chunk, seq_lens.repeat(counts))
    virtual_start_loc = np.zeros(num_virtual + 1, dtype=np.int32)
    # In a request, the position and the index in the packed batch differ by the same number for all tokens.
    np.add(seq_ends, (query_start_loc[1:] - seq_lens).repeat(counts), out=virtual_start_loc[1:])
    return VirtualRequests(requests.repeat(counts), chunk_starts, seq_ends, virtual_start_loc, one_each=False)


def split_at_ranges(virtual: VirtualRequests, range_ends: IntArray, chunk: int) -> VirtualRequests:
    """Give the tokens whose range goes on in later chunks virtual requests of their own.

    These are the last tokens of their chunk. All of them see the chunk up to the end of the range. So the end of their
    virtual request is that of the range, though its own tokens end earlier.

    Args:
        virtual: The virtual requests of whole chunks.
        range_ends: ``[num_tokens]``: where the range of each packed token ends; 0 for none.
        chunk: Tokens of a chunk.
    """
    bounds = virtual.query_start_loc
    of_token = np.arange(len(virtual.requests)).repeat(bounds[1:] - bounds[:-1])
    goes_on = range_ends[: len(of_token)] > virtual.chunk_starts[of_token] + chunk
    if not goes_on.any():
        return virtual
    begins = np.diff(goes_on, prepend=False) & goes_on
    starts = np.union1d(bounds[:-1], np.flatnonzero(begins)).astype(np.int32)
    of_start, new_bounds = of_token[starts], np.append(starts, bounds[-1])
    # In a chunk, the position and the index in the packed batch differ by the same number for all tokens.
    own_ends = virtual.seq_ends[of_start] - bounds[1:][of_start] + new_bounds[1:]
    return VirtualRequests(
        requests=virtual.requests[of_start],
        chunk_starts=virtual.chunk_starts[of_start],
        seq_ends=np.where(goes_on[starts], range_ends[starts], own_ends).astype(np.int32),
        query_start_loc=new_bounds,
        one_each=False,
    )


def most_virtual_requests(num_reqs: int, num_tokens: int, max_query_len: int, chunk: int) -> int:
    """Return the most virtual requests that a batch of these sizes can have, at least one.

    Two tokens are enough to split a request once, and each further split takes a whole chunk: ``q`` tokens are in at
    most ``2 + (q - 2) // chunk`` chunks.

    Args:
        num_reqs: Requests, including padded ones.
        num_tokens: Packed tokens, including padded ones.
        max_query_len: The most new tokens of a request.
        chunk: Tokens of a chunk.
    """
    per_request = min(max_query_len, 2) + max(0, max_query_len - 2) // chunk
    of_tokens = min(num_tokens, 2 * num_reqs) + max(0, num_tokens - 2 * num_reqs) // chunk
    return max(1, min(num_reqs * per_request, of_tokens))
