"""Choice by content: which of the live tokens each query reads, as a value that kernels can read.

A layer, or the model before it, scores the live tokens of a request and keeps the best ones for each query (DeepSeek
sparse attention, arXiv 2512.02556; MoBA, arXiv 2502.13189). The live range stays the upper bound of what is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from kvframe.contract.fields import positive_int, whole_number

if TYPE_CHECKING:
    import torch

    from kvframe.contract.masks import MaskFunction
    from kvframe.contract.metadata import CommonAttentionMetadata


@attrs.frozen(kw_only=True)
class ChoiceSpec:
    """The form of the choices that a layer reads.

    Attributes:
        max_chosen: The most tokens, or blocks of tokens, that are chosen for a query.
        block_size: Tokens of a chosen block; 1 for single tokens. Block ``b`` has the tokens of the positions
            ``[b * block_size, (b + 1) * block_size)``.
        num_choosers: Choices for each query: one for all heads, or one for each of so many equal groups of KV heads.
    """

    max_chosen: int = positive_int
    block_size: int = attrs.field(default=1, validator=whole_number(1))
    num_choosers: int = attrs.field(default=1, validator=whole_number(1))

    @property
    def unit(self) -> str:
        """What is chosen, in the words of ``Capabilities.choices``: ``tokens`` or ``blocks``."""
        return "tokens" if self.block_size == 1 else "blocks"


@attrs.frozen(eq=False)
class ChosenTokens:
    """The tokens that are chosen for each query of a step. A query reads those of them that its mask shows.

    Attributes:
        indices: ``[num_tokens, num_choosers, max_chosen], int32, device``: positions in the query's request, or the
            numbers of blocks; negative numbers for none. No index stands twice. Fewer than ``max_chosen`` may be given,
            for all queries alike.
        block_size: Tokens of a chosen block; 1 for single tokens.
    """

    indices: torch.Tensor
    block_size: int = 1

    def rows(self, take: Callable[[torch.Tensor], torch.Tensor]) -> ChosenTokens:
        """Return the choices of the queries whose rows ``take`` returns, ``[num_tokens, num_choosers, max_chosen]``."""
        return attrs.evolve(self, indices=take(self.indices))

    def positions(self) -> torch.Tensor:
        """Return the chosen positions, ``[num_tokens, num_choosers, max_tokens], int64, device``; -1 for none."""
        import torch

        indices = self.indices.long()
        if self.block_size == 1:
            return indices.clamp(min=-1)
        offsets = torch.arange(self.block_size, device=indices.device)
        positions = (indices[..., None] * self.block_size + offsets).flatten(2)
        return positions.masked_fill(positions < 0, -1)


@attrs.frozen(eq=False)
class ChosenPlaces:
    """Where the chosen tokens of a step lie, those that the queries see.

    Attributes:
        blocks: ``[num_tokens, num_choosers, max_tokens], int64, device``: their block ids; 0 for a token that is not
            read.
        offsets: Likewise: their offsets within the blocks.
        seen: Likewise, bool: whether the query reads the token.
    """

    blocks: torch.Tensor
    offsets: torch.Tensor
    seen: torch.Tensor


def find_chosen(chosen: ChosenTokens, metadata: CommonAttentionMetadata, sees: MaskFunction) -> ChosenPlaces:
    """Return where the chosen tokens of a step lie. Only tensors on the device are read, so nothing waits for it.

    Args:
        chosen: The choices.
        metadata: The step, of the layer's cache group.
        sees: The mask of the layer's type (``KVCacheSpec.mask_function``). A batch that is not causal overrides it.
    """
    import torch

    from kvframe.contract.metadata import RANGE_ENDS, SEQ_STARTS

    positions = chosen.positions()
    starts = metadata.query_start_loc.long()
    token = torch.arange(positions.shape[0], device=positions.device)
    request = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(max=metadata.num_reqs - 1)
    lens = metadata.seq_lens.long()[request]
    query = (lens - starts[request + 1] + token)[:, None, None]
    is_seen = (positions >= 0) & (positions < lens[:, None, None])
    if metadata.causal:
        shown: torch.Tensor = sees(query, positions.clamp(min=0))
        ends = metadata.extensions.get(RANGE_ENDS)
        if ends is not None:
            shown = shown | ((positions > query) & (positions < ends.values.long()[:, None, None]))
        is_seen &= shown
    seq_starts = metadata.extensions.get(SEQ_STARTS)
    if seq_starts is not None:
        is_seen &= positions >= seq_starts.values.long()[request][:, None, None]
    positions = positions.masked_fill(~is_seen, 0)
    index = torch.div(positions, metadata.block_size, rounding_mode="floor")
    blocks = metadata.block_table.long()[request[:, None, None], index].masked_fill(~is_seen, 0)
    return ChosenPlaces(blocks, positions % metadata.block_size, is_seen)
