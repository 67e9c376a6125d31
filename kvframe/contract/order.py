"""The order of a batch's requests that a backend asks for, and where each kind of request lies in it.

Everything is computed on the host, from the copies of the metadata there.
"""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.contract.errors import BackendError
from kvframe.contract.metadata import CommonAttentionMetadata

IntArray = npt.NDArray[np.int64]

_DECODE, _EXTEND, _PREFILL, _PADDING = range(4)
_KINDS = ("a decode", "an extend", "a fresh prefill", "a padded row")


@attrs.frozen(kw_only=True)
class BatchOrder:
    """The order of requests that a backend asks for: each kind of request is one slice of the batch.

    Decodes, requests of at most ``decode_threshold`` new tokens, come first. Longer requests are extends if they have
    tokens in the cache before this step, otherwise fresh prefills. Padded rows, without new tokens, come last.

    Attributes:
        decode_threshold: The most new tokens of a decode.
        extends_first: Whether extends come before fresh prefills; otherwise the two may be mixed.
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
        """Return each request's rank, ``[num_reqs]``: a batch is in this order if its ranks never decrease.

        A rank is the request's kind; if extends and fresh prefills may be mixed, both are extends.
        """
        kinds = self.kinds(num_computed, query_lens)
        if not self.extends_first:
            kinds[kinds == _PREFILL] = _EXTEND
        return kinds


@attrs.frozen(kw_only=True)
class BatchSplit:
    """How many requests and tokens of each kind a batch has, without padding.

    Decodes are the batch's first ``num_decodes`` requests and ``num_decode_tokens`` tokens. With ``extends_first``,
    extends are the next slice and fresh prefills the one after it. Without it, extends and fresh prefills together are
    one slice, and their counts do not say where each lies.
    """

    num_decodes: int
    num_decode_tokens: int
    num_extends: int
    num_extend_tokens: int
    num_prefills: int
    num_prefill_tokens: int


def split_batch(metadata: CommonAttentionMetadata, order: BatchOrder) -> BatchSplit:
    """Count the kinds of requests in a batch that is in the builder's own ``batch_order``.

    Raises:
        BackendError: The batch is in another order.
    """
    query_lens = np.diff(metadata.query_start_loc_cpu.numpy())
    num_computed = metadata.seq_lens_cpu.numpy() - query_lens
    ranks = order.ranks(num_computed, query_lens)
    kinds = order.kinds(num_computed, query_lens)
    if (ranks[1:] < ranks[:-1]).any():
        place = int(np.argmax(ranks[1:] < ranks[:-1])) + 1
        before, after = (f"{_KINDS[kinds[at]]} (query length {query_lens[at]})" for at in (place - 1, place))
        raise BackendError(
            f"the batch is not in the order {order}: request {place} is {after} and comes after {before}; "
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
