"""The backend that the wrong ones are made of: correct, in several dtypes, with the log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from kvframe.contract.backend import KVCache
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import LayerSpec
from tests.testing.lse_backends import LseBackend
from tests.testing.plain_backend import Built


class RightBackend(LseBackend):
    """Attention by its definition."""

    capabilities = attrs.evolve(LseBackend.capabilities, dtypes=frozenset({"float32", "bfloat16", "float16"}))


@attrs.frozen
class Batch:
    """What a kernel sees of a step, without padding.

    Attributes:
        layer: The layer.
        query_lens: New tokens of each request.
        seq_lens: Tokens of each request after the step.
    """

    layer: LayerSpec
    query_lens: Sequence[int]
    seq_lens: Sequence[int]

    @classmethod
    def of(cls, layer: LayerSpec, common: CommonAttentionMetadata) -> Batch:
        """Return what a kernel sees of a batch."""
        pairs = zip(common.query_start_loc.diff().tolist(), common.seq_lens.tolist(), strict=True)
        lengths = [(query_len, seq_len) for query_len, seq_len in pairs if query_len]
        return cls(layer, [pair[0] for pair in lengths], [pair[1] for pair in lengths])

    @property
    def only_decodes(self) -> bool:
        """Whether each request computes one token after others."""
        return max(self.query_lens) == 1 and min(self.seq_lens) > 1

    @property
    def only_prompts(self) -> bool:
        """Whether each request is at its first tokens, several of them."""
        return [*self.query_lens] == [*self.seq_lens] and min(self.query_lens) > 1

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        assert self.layer.query is not None
        return self.layer.query.num_heads // getattr(self.layer.spec, "num_kv_heads", 1)

    def option(self, name: str) -> int:
        """Return a size of the spec; 0 if it has none."""
        return getattr(self.layer.spec, name, None) or 0


class WrongRows(RightBackend):
    """Returns zeros for some of the queries, as a kernel does whose grid ends too early."""

    def wrong_from(self, batch: Batch) -> int | None:
        """Return the first wrong query of the batch; None if all are right."""
        return None

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **options: Any
    ) -> torch.Tensor:
        output = super().attend(layer, query, kv_cache, metadata, **options)
        common = self.step_of(metadata).common
        batch = Batch.of(layer, common)
        first = self.wrong_from(batch) if batch.query_lens else None
        if first is not None:
            output[first:] = 0
        return output


class WrongRequests(RightBackend):
    """Changes what one request's queries see."""

    def is_wrong(self, layer: LayerSpec, built: Built, request: int, num_new: int, seq_len: int) -> bool:
        """Return whether a request's output is wrong."""
        return False

    def attend_request(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        built: Built,
        request: int,
        seq_len: int,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        output = super().attend_request(layer, query, kv_cache, built, request, seq_len, sinks)
        return output * 0 if self.is_wrong(layer, built, request, len(query), seq_len) else output
