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

_KINDS = ("a decode", "a longer request", "a padded row")


@attrs.frozen(kw_only=True)
class BatchOrder:
    """The order of requests that a backend asks for: each kind of request is one slice of the batch.

    Decodes, requests of at most ``decode_threshold`` new tokens, come first, then longer requests. Padded rows, without
    new tokens, come last.
    """

    decode_threshold: int = 1

    def ranks(self, query_lens: npt.ArrayLike) -> IntArray:
        """Return each request's kind: 0 for a decode, 1 for a longer one, 2 for a padded row.

        A batch is in this order if the kinds never decrease.

        Args:
            query_lens: ``[num_reqs]``: tokens that this step computes.
        """
        query_lens = np.asarray(query_lens)
        return np.where(query_lens == 0, 2, (query_lens > self.decode_threshold).astype(np.int64))


@attrs.frozen(kw_only=True)
class BatchSplit:
    """How many requests and tokens of each kind a batch has, without padding; decodes come first."""

    num_decodes: int
    num_decode_tokens: int
    num_longer: int
    num_longer_tokens: int


def split_batch(metadata: CommonAttentionMetadata, order: BatchOrder) -> BatchSplit:
    """Count the kinds of requests in a batch that is in the builder's own ``batch_order``.

    Raises:
        BackendError: The batch is in another order.
    """
    query_lens = np.diff(metadata.query_start_loc_cpu.numpy())
    ranks = order.ranks(query_lens)
    if (ranks[1:] < ranks[:-1]).any():
        index = int(np.argmax(ranks[1:] < ranks[:-1])) + 1
        previous_kind, kind = (f"{_KINDS[ranks[at]]} (query length {query_lens[at]})" for at in (index - 1, index))
        raise BackendError(
            f"the batch is not in the order {order}: request {index} is {kind} and comes after {previous_kind}; "
            "a builder that splits its batches must set batch_order to the order that it splits by"
        )
    requests = np.bincount(ranks, minlength=3).tolist()
    tokens = np.bincount(ranks, weights=query_lens, minlength=3).astype(np.int64).tolist()
    return BatchSplit(
        num_decodes=requests[0], num_decode_tokens=tokens[0], num_longer=requests[1], num_longer_tokens=tokens[1]
    )
