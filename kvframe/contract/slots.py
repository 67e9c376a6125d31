"""Slots: where a layer stores the tokens that it is given, in the form that a kernel reads."""

from __future__ import annotations

import attrs
import torch


@attrs.frozen(eq=False)
class Slots:
    """Where tokens are stored. A host gives it as one number for each token; blocks and offsets follow from these.

    A token with a negative number is not stored. Its entry in ``blocks`` and ``offsets`` is the first slot of block 0,
    the null page. No request owns that page, so a kernel may write the token there. Padded tokens have slot 0.

    Attributes:
        flat: ``[num_tokens], int64, device``: ``block_id * block_size + offset`` of each token, or a negative number.
        block_size: Tokens per block.
        indices: Block ids and offsets, ``[num_tokens], int64, device`` both, as ``index_put_`` takes them. If the host
            does not give them, they are made of ``flat``.
    """

    flat: torch.Tensor
    block_size: int
    indices: tuple[torch.Tensor, torch.Tensor] = attrs.field(
        default=attrs.Factory(lambda self: split_slots(self.flat.clamp(min=0), self.block_size), takes_self=True)
    )

    @classmethod
    def at(cls, blocks: torch.Tensor, offsets: torch.Tensor, block_size: int) -> Slots:
        """Return the slots of stored tokens from block ids and offsets, ``[num_tokens], int64, device`` each."""
        return cls(blocks * block_size + offsets, block_size, (blocks, offsets))

    @property
    def blocks(self) -> torch.Tensor:
        """Block ids, ``[num_tokens], int64, device``."""
        return self.indices[0]

    @property
    def offsets(self) -> torch.Tensor:
        """Offsets within the blocks, ``[num_tokens], int64, device``."""
        return self.indices[1]


def split_slots(flat: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block ids and offsets of slots that are not negative, in a tensor of any shape, ``int64, device``."""
    if block_size & (block_size - 1) == 0:
        # Shifts: a division takes ten times as long on a processor.
        return flat >> (block_size.bit_length() - 1), flat & (block_size - 1)
    return torch.div(flat, block_size, rounding_mode="floor"), flat % block_size
