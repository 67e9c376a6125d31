"""Pads a step's metadata to the sizes that a graph was captured for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from kvframe.contract.errors import BatchError
from kvframe.contract.metadata import Axis, CommonAttentionMetadata, change_extensions


def pad_metadata(
    metadata: CommonAttentionMetadata,
    *,
    num_reqs: int,
    num_tokens: int,
    num_generating: int,
    max_query_len: int,
    max_seq_len: int | None = None,
) -> CommonAttentionMetadata:
    """Return the step at a graph's sizes, with ``static_shapes`` set; the real rows are unchanged.

    Added requests have no tokens, added tokens lie in the null page, added generating rows repeat the last one.

    Args:
        metadata: The step; never written to.
        num_reqs: The graph's requests.
        num_tokens: Its packed tokens.
        num_generating: Its generating rows, at least one.
        max_query_len: The most new tokens of a request in any batch that it is replayed for; at most ``num_tokens``.
        max_seq_len: The longest request in any such batch; the block table is widened to its blocks. None for this
            step's own.

    Raises:
        BatchError: The step does not fit into these sizes, or the sizes do not fit together.
    """
    return _Padder(num_reqs, num_tokens, num_generating).pad(metadata, max_query_len, max_seq_len)


def pad_step(
    metadata: Sequence[CommonAttentionMetadata],
    *,
    num_reqs: int,
    num_tokens: int,
    num_generating: int,
    max_query_len: int,
    max_seq_lens: Sequence[int],
) -> tuple[CommonAttentionMetadata, ...]:
    """Return the metadata of all cache groups padded by ``pad_metadata``; tensors that they shared stay shared.

    Args:
        metadata: The step, one value per cache group.
        num_reqs: As for ``pad_metadata``.
        num_tokens: Likewise.
        num_generating: Likewise.
        max_query_len: Likewise.
        max_seq_lens: For each cache group, the longest sequence in any batch that it is replayed for.
    """
    padder = _Padder(num_reqs, num_tokens, num_generating)
    return tuple(
        padder.pad(common, max_query_len, max_seq_len)
        for common, max_seq_len in zip(metadata, max_seq_lens, strict=True)
    )


class _Padder:
    """Pads tensors of one step, each once."""

    def __init__(self, num_reqs: int, num_tokens: int, num_generating: int) -> None:
        self._sizes = {"num_reqs": num_reqs, "num_tokens": num_tokens, "num_generating": num_generating}
        self._padded: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def pad(
        self, metadata: CommonAttentionMetadata, max_query_len: int, max_seq_len: int | None
    ) -> CommonAttentionMetadata:
        max_seq_len = metadata.max_seq_len if max_seq_len is None else max_seq_len
        num_reqs, num_tokens, num_generating = self._sizes.values()
        minimums = {
            "num_reqs": metadata.num_reqs,
            "num_tokens": max(metadata.slot_mapping.shape[0], max_query_len),
            "num_generating": metadata.num_generating_rows,
            "max_query_len": metadata.max_query_len,
            "max_seq_len": metadata.max_seq_len,
        }
        for name, size in {**self._sizes, "max_query_len": max_query_len, "max_seq_len": max_seq_len}.items():
            if size < minimums[name]:
                raise BatchError(
                    f"a graph with {name} = {size} is too small for this step, which needs at least {minimums[name]}"
                )
        generating, generating_cpu = (
            None if indices is None else self._repeat_last(indices, num_generating)
            for indices in (metadata.generating_indices, metadata.generating_indices_cpu)
        )
        num_columns = max(metadata.block_table.shape[1], -(-max_seq_len // metadata.block_size))
        return attrs.evolve(
            metadata,
            query_start_loc=self._repeat_last(metadata.query_start_loc, num_reqs + 1),
            query_start_loc_cpu=self._repeat_last(metadata.query_start_loc_cpu, num_reqs + 1),
            seq_lens=self._fill(metadata.seq_lens, num_reqs),
            seq_lens_cpu=self._fill(metadata.seq_lens_cpu, num_reqs),
            num_reqs=num_reqs,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            block_table=_fill(metadata.block_table, (num_reqs, num_columns)),
            slot_mapping=self._fill(metadata.slot_mapping, num_tokens),
            generating_indices=generating,
            generating_indices_cpu=generating_cpu,
            static_shapes=True,
            extensions=change_extensions(
                metadata.extensions,
                {
                    Axis.REQUEST: lambda values: self._fill(values, num_reqs),
                    Axis.TOKEN: lambda values: self._fill(values, num_tokens),
                },
            ),
        )

    def _fill(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """Return the tensor with rows of zeros after it."""
        return self._once(tensor, lambda: _fill(tensor, (size, *tensor.shape[1:])))

    def _repeat_last(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """Return the tensor with its last element repeated after it."""
        return self._once(tensor, lambda: torch.cat([tensor, tensor[-1:].expand(size - tensor.shape[0])]))

    def _once(self, tensor: torch.Tensor, pad: Callable[[], torch.Tensor]) -> torch.Tensor:
        if id(tensor) not in self._padded:
            # The tensor is kept too, so that no other tensor gets its id.
            self._padded[id(tensor)] = tensor, pad()
        return self._padded[id(tensor)][1]


def _fill(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor at the start of one of zeros."""
    padded = tensor.new_zeros(shape)
    padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded
