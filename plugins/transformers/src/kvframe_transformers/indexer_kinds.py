"""The kinds of sparse indexers: how each is called, what it returns, and which modules have one or read its choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import nn

from kvframe_transformers.states import names_of


@attrs.frozen
class IndexerKind:
    """How an indexer is called, and what it returns.

    Attributes:
        max_chosen: The most tokens or blocks that it chooses for a query.
        block_size: Tokens of a chosen block; 1 for tokens.
        num_choosers: Its choices for each query.
        mask_dims: The dimensions of the mask that it takes: 2 for a row per token, 3 or 4 for a row per query and a
            column per key; 0 for none.
        returns_mask: Whether it returns a mask, and not indices.
    """

    max_chosen: int
    block_size: int = 1
    num_choosers: int = 1
    mask_dims: int = 3
    returns_mask: bool = False

    @classmethod
    def of(cls, module: Any) -> IndexerKind | None:
        """Return the kind of an indexer by its own numbers; None if they are others."""
        numbers = vars(module)
        if {"token_budget", "compress_ratio"} <= numbers.keys():
            return cls(module.token_budget + module.compress_ratio - 1, mask_dims=4, returns_mask=True)
        if {"topk_blocks", "block_size", "num_heads"} <= numbers.keys():
            return cls(module.topk_blocks, module.block_size, module.num_heads, mask_dims=0)
        if {"index_topk", "index_kpool"} <= numbers.keys():
            tail = module.index_kpool - 1 if module.index_kpool_always_select_tail else 0
            return cls(module.index_topk + tail, mask_dims=2)
        return cls(module.index_topk) if "index_topk" in numbers else None

    @property
    def choice(self) -> dict[str, int]:
        """The field ``choice`` of the query side of layers that read what it chooses."""
        fields = {"max_chosen": self.max_chosen, "block_size": self.block_size, "num_choosers": self.num_choosers}
        return {name: number for name, number in fields.items() if name == "max_chosen" or number != 1}

    def empty(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Return a result without values: ``[1, num_tokens, max_chosen]``, or as the module's own is laid out."""
        if self.returns_mask:
            return torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool, device=device)
        if self.block_size > 1:
            return torch.empty(1, self.num_choosers, num_tokens, self.max_chosen, dtype=torch.int64, device=device)
        return torch.empty(1, num_tokens, self.max_chosen, dtype=torch.int32, device=device)

    @property
    def takes_batches(self) -> bool:
        """Whether it takes several sequences, whose keys are followed by others that their queries do not see."""
        return not self.returns_mask and self.mask_dims != 2

    def mask(self, positions: torch.Tensor, num_keys: int) -> torch.Tensor | None:
        """Return a mask, True for what queries see; None if it takes none.

        Args:
            positions: ``[num_requests, num_queries], device``: those of the queries.
            num_keys: Keys of the longest request.
        """
        if not self.mask_dims:
            return None
        if self.mask_dims == 2:
            return torch.ones_like(positions, dtype=torch.bool)
        visible = torch.arange(num_keys, device=positions.device) <= positions[..., None]
        return visible if self.mask_dims == 3 else visible.unsqueeze(1)

    def indices(self, result: torch.Tensor) -> torch.Tensor:
        """Return what is chosen, ``[num_requests, num_new, num_choosers, at most max_chosen], int32``; -1 for none."""
        if self.block_size > 1:
            return result.transpose(1, 2).int()
        if not self.returns_mask:
            return result.unsqueeze(2).int()
        choice_mask = result[:, 0]
        num_keys = choice_mask.shape[-1]
        positions = torch.arange(num_keys, device=choice_mask.device, dtype=torch.int32).expand_as(choice_mask)
        # The chosen ones come first, because the others are larger than any position.
        first = positions.masked_fill(~choice_mask, num_keys).sort(-1).values[..., : self.max_chosen]
        return first.masked_fill(first == num_keys, -1).unsqueeze(2)


def find_indexer(attention: nn.Module) -> nn.Module | None:
    """Return the indexer of an attention module; None if it has none."""
    indexer = getattr(attention, "indexer", None)
    return indexer if isinstance(indexer, nn.Module) else None


def keeps_index_keys(module: nn.Module) -> bool:
    """Return whether a module is an indexer of a known kind, which keeps keys in transformers' cache."""
    return IndexerKind.of(module) is not None and bool(names_of(type(module)) & {"update_indexer", "update_index"})


def reads_choices(attention: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether an attention module reads chosen tokens: of its own indexer, or of an earlier layer's.

    Args:
        attention: The module.
        inputs: What came with its call.
    """
    indexer = find_indexer(attention)
    if indexer is not None and keeps_index_keys(indexer):
        return True
    return getattr(attention, "skip_topk", False) is True or inputs.get("indices") is not None
