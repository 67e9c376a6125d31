"""The order of a batch's requests: which order backends ask for, and the permutation into it.

Everything here is decided on the host, from the metadata's host copies; the device gets one upload for a permutation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.contract.errors import BackendError
from kvframe.contract.metadata import Axis, CommonAttentionMetadata, change_extensions

IntArray = npt.NDArray[np.int64]

_DECODE, _EXTEND, _PREFILL, _PADDING = range(4)
_KINDS = ("a decode", "an extend", "a fresh prefill", "a padded row")


@attrs.frozen(kw_only=True)
class BatchOrder:
    """The order of requests that a backend asks for, so that each kind of them is one slice of the batch.

    Decodes come first: requests of at most ``decode_threshold`` new tokens. Extends are longer and have tokens in the
    cache before this step; fresh prefills have none. Padded rows, without new tokens, come last.

    Attributes:
        decode_threshold: The most new tokens of a decode.
        extends_first: Whether extends come before fresh prefills; if not, the two may be mixed.
    """

    decode_threshold: int = 1
    extends_first: bool = False

    def kinds(self, num_computed: npt.ArrayLike, query_lens: npt.ArrayLike) -> IntArray:
        """Return each request's kind: 0 for a decode, 1 an extend, 2 a fresh prefill, 3 a padded row.

        Args:
            num_computed: ``[num_reqs]``: tokens that were computed before this step.
            query_lens: ``[num_reqs]``: tokens that this step computes.
        """
        query_lens = np.asarray(query_lens)
        longer = query_lens > self.decode_threshold
        kinds = np.where(longer, np.where(np.asarray(num_computed) > 0, _EXTEND, _PREFILL), _DECODE)
        kinds[query_lens == 0] = _PADDING
        return kinds

    def ranks(self, num_computed: npt.ArrayLike, query_lens: npt.ArrayLike) -> IntArray:
        """Return each request's place among the kinds: a batch whose ranks never fall is in this order.

        Args:
            num_computed: ``[num_reqs]``: tokens that were computed before this step.
            query_lens: ``[num_reqs]``: tokens that this step computes.

        Returns:
            ``[num_reqs]``: the request's kind, with fresh prefills as extends where the two may be mixed.
        """
        kinds = self.kinds(num_computed, query_lens)
        if not self.extends_first:
            kinds[kinds == _PREFILL] = _EXTEND
        return kinds


def find_order(wishes: Sequence[BatchOrder], num_computed: IntArray, query_lens: IntArray) -> IntArray | None:
    """Find one order of a batch's requests that satisfies as many wishes as can be, the first ones first.

    A wish that contradicts those before it is left out: whoever has it permutes the batch for itself. Requests that
    no satisfied wish tells apart stay in the order they are in.

    Args:
        wishes: What the attention groups ask for, the most important first.
        num_computed: ``[num_reqs]``: tokens of each request that were computed before this step.
        query_lens: ``[num_reqs]``: tokens of each request that this step computes.

    Returns:
        ``[num_reqs]``: which request stands at each place; None if all stay where they are.
    """
    order: IntArray | None = None
    satisfied: list[IntArray] = []
    for wish in dict.fromkeys(wishes):
        ranks = wish.ranks(num_computed, query_lens)
        if not _never_falls(ranks if order is None else ranks[order]):
            # Wishes contradict each other just where one of them puts some pair of requests one way and another the
            # other way. So sorting by all of them finds an order if there is one; the last key is the first sorted
            # by, and which of those that agree comes first makes no difference.
            candidate = np.lexsort([ranks, *satisfied])
            if not _never_falls(ranks[candidate]):
                continue
            order = candidate
        satisfied.append(ranks)
    return order


def is_ordered(order: BatchOrder, metadata: CommonAttentionMetadata) -> bool:
    """Return whether a batch's requests are in ``order``."""
    return _never_falls(order.ranks(*_lengths(metadata)))


@attrs.frozen(kw_only=True, eq=False)
class Permutation:
    """From the batch's order to one group's own order, and back.

    Attributes:
        requests: ``[num_reqs], int64, device``: which request of the batch stands at each place of the group's order.
        tokens: ``[num_tokens], int64, device``: likewise for the packed tokens, padded ones included.
            ``query.index_select(0, tokens)`` is what the group's layers are given.
        inverse: ``[num_tokens], int64, device``: the way back:
            ``output.index_select(0, inverse)`` is in the batch's order.
    """

    requests: torch.Tensor
    tokens: torch.Tensor
    inverse: torch.Tensor


def permute(metadata: CommonAttentionMetadata, order: BatchOrder) -> tuple[CommonAttentionMetadata, Permutation]:
    """Put a batch into the order that one group asks for.

    Args:
        metadata: The step's metadata after the group's wrapper chain. Never written to.
        order: What the group asks for.

    Returns:
        The metadata of the same requests and tokens in that order, padded tokens still behind the others; and the
        permutation that led to it.
    """
    num_computed, query_lens = _lengths(metadata)
    starts = metadata.query_start_loc_cpu.numpy()
    num_tokens, num_actual = metadata.slot_mapping.shape[0], int(starts[-1])
    requests = np.argsort(order.ranks(num_computed, query_lens), kind="stable")
    query_lens = query_lens[requests]
    new_starts = np.zeros_like(starts)
    np.cumsum(query_lens, out=new_starts[1:])
    tokens = np.arange(num_tokens)
    tokens[:num_actual] += np.repeat(starts[:-1][requests] - new_starts[:-1], query_lens)
    inverse = np.empty_like(tokens)
    inverse[tokens] = np.arange(num_tokens)
    generating = metadata.generating_indices_cpu.numpy().copy()
    if count := metadata.num_generating:
        generating[:count] = np.sort(inverse[generating[:count]])
        generating[count:] = generating[count - 1]

    uploaded = _upload([requests, tokens, inverse, generating, new_starts], metadata.query_start_loc.device)
    requests_there, tokens_there, inverse_there, generating_there, starts_there = uploaded
    requests_here = torch.from_numpy(requests)
    permuted = attrs.evolve(
        metadata,
        query_start_loc=starts_there,
        query_start_loc_cpu=torch.from_numpy(new_starts),
        seq_lens=metadata.seq_lens.index_select(0, requests_there),
        seq_lens_cpu=metadata.seq_lens_cpu.index_select(0, requests_here),
        block_table=metadata.block_table.index_select(0, requests_there),
        slot_mapping=metadata.slot_mapping.index_select(0, tokens_there),
        generating_indices=generating_there,
        generating_indices_cpu=torch.from_numpy(generating),
        extensions=change_extensions(
            metadata.extensions,
            _rows_of(requests_there, tokens_there),
            _rows_of(requests_here, torch.from_numpy(tokens)),
        ),
    )
    return permuted, Permutation(requests=requests_there, tokens=tokens_there, inverse=inverse_there)


@attrs.frozen(kw_only=True)
class BatchSplit:
    """How many requests and tokens of each kind a batch has, padding left out.

    Decodes are the batch's first ``num_decodes`` requests and ``num_decode_tokens`` tokens. With ``extends_first``,
    extends are the slice behind them and fresh prefills the slice behind those; without it, these two counts are
    counts only, and extends and fresh prefills together are one slice.
    """

    num_decodes: int
    num_decode_tokens: int
    num_extends: int
    num_extend_tokens: int
    num_prefills: int
    num_prefill_tokens: int


def split_batch(metadata: CommonAttentionMetadata, order: BatchOrder) -> BatchSplit:
    """Return where the kinds of requests lie in a batch that is in ``order``.

    A request with tokens in the cache before this step is never counted as a fresh prefill.

    Args:
        metadata: What a builder is given.
        order: The builder's own ``batch_order``.

    Raises:
        BackendError: The batch is in another order.
    """
    num_computed, query_lens = _lengths(metadata)
    ranks = order.ranks(num_computed, query_lens)
    kinds = order.kinds(num_computed, query_lens)
    if not _never_falls(ranks):
        place = int(np.argmax(ranks[1:] < ranks[:-1])) + 1
        before, behind = (f"{_KINDS[kinds[at]]} (query length {query_lens[at]})" for at in (place - 1, place))
        raise BackendError(
            f"the batch is not in the order {order}: request {place} is {behind} and stands behind {before}; "
            "a builder that splits its batches must set batch_order to the order that it splits by"
        )
    requests = np.bincount(kinds, minlength=4)
    tokens = np.bincount(kinds, weights=query_lens, minlength=4)
    return BatchSplit(
        num_decodes=int(requests[_DECODE]),
        num_decode_tokens=int(tokens[_DECODE]),
        num_extends=int(requests[_EXTEND]),
        num_extend_tokens=int(tokens[_EXTEND]),
        num_prefills=int(requests[_PREFILL]),
        num_prefill_tokens=int(tokens[_PREFILL]),
    )


def _never_falls(ranks: IntArray) -> bool:
    return bool((ranks[1:] >= ranks[:-1]).all())


def _lengths(metadata: CommonAttentionMetadata) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return each request's number of tokens before this step, and in it."""
    query_lens = np.diff(metadata.query_start_loc_cpu.numpy())
    return metadata.seq_lens_cpu.numpy() - query_lens, query_lens


def _upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to the device as one; each result starts where any dtype may start."""
    ends = np.cumsum([-(-array.nbytes // 8) * 8 for array in arrays]).tolist()
    buffer = np.empty(ends[-1], dtype=np.uint8)
    for array, start in zip(arrays, [0, *ends], strict=False):
        buffer[start : start + array.nbytes].view(array.dtype)[:] = array
    there = torch.from_numpy(buffer).to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
        for array, start in zip(arrays, [0, *ends], strict=False)
    ]


def _rows_of(requests: torch.Tensor, tokens: torch.Tensor) -> Mapping[Axis, Callable[[torch.Tensor], torch.Tensor]]:
    return {
        Axis.REQUEST: lambda values: values.index_select(0, requests),
        Axis.TOKEN: lambda values: values.index_select(0, tokens),
    }
