"""Wrappers that are wrong for some batches, on some devices, or from call to call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch
from kvframe_chunked_local.wrapper import ChunkedLocal

from kvframe.contract.metadata import SEQ_STARTS, CommonAttentionMetadata
from kvframe.contract.wrapper import FieldUse, MetadataWrapper, field_uses
from tests.testing.mistakes.kinds import kind

Change = Callable[[CommonAttentionMetadata], Mapping[str, Any]]


class RightWrapper(MetadataWrapper):
    """Returns a batch whose tensors are all copies."""

    name: ClassVar[str] = "right_wrapper"
    fields: ClassVar[Mapping[str, FieldUse]] = dict.fromkeys(field_uses(), FieldUse.RESET)
    extensions: ClassVar[Mapping[str, FieldUse]] = {SEQ_STARTS: FieldUse.CARRY}

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return attrs.evolve(metadata, **self.change(metadata), extensions=self.pass_extensions(metadata))

    def change(self, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the fields that it makes."""
        return {}


def _wrapper(name: str, change: Change, missed: str = "") -> None:
    members = {"change": lambda self, metadata: change(metadata)}
    kind(name, missed)(attrs.frozen(kw_only=True)(type("Wrong", (RightWrapper,), members)))


def _swapped(metadata: CommonAttentionMetadata) -> torch.Tensor:
    """Return the block table with the tables of the first two requests exchanged."""
    rows = torch.arange(metadata.num_reqs, device=metadata.block_table.device)
    rows[:2] = 1 - rows[:2]
    return metadata.block_table.index_select(0, rows)


_wrapper(
    "a device field is made of the host's numbers, on the host",
    lambda metadata: {"seq_lens": metadata.seq_lens_cpu.clone()},
)
_wrapper(
    "a device field is made on the host from numbers",
    lambda metadata: (
        {"query_start_loc": torch.tensor([int(start) for start in metadata.query_start_loc_cpu]).int()}
        if metadata.num_reqs < 8
        else {}
    ),
)
_wrapper(
    "a wrapper is wrong for one request alone",
    lambda metadata: {"block_table": metadata.block_table.roll(1, 1)} if metadata.num_reqs == 1 else {},
)
_wrapper(
    "a wrapper is wrong from 19 requests on",
    lambda metadata: {"block_table": _swapped(metadata)} if 18 < metadata.num_reqs < 200 else {},
)
_wrapper(
    "a wrapper is wrong for more than 256 tokens of a step",
    lambda metadata: {"block_table": _swapped(metadata)} if metadata.num_actual_tokens > 256 else {},
)
_wrapper(
    "a wrapper is wrong for requests of more than 512 tokens",
    lambda metadata: {"block_table": metadata.block_table.roll(1, 1)} if metadata.max_seq_len > 512 else {},
)


@kind("a wrapper seeds torch's generator")
@attrs.frozen(kw_only=True)
class _Seeds(RightWrapper):
    def change(self, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        torch.manual_seed(3)
        return {}


@kind("a wrapper returns the same memory for every step")
@attrs.frozen(kw_only=True)
class _SameMemory(RightWrapper):
    buffer: ClassVar[dict[Any, torch.Tensor]] = {}

    def change(self, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        lens = metadata.seq_lens
        memory = self.buffer.setdefault((type(lens), lens.shape), lens.clone())
        return {"seq_lens": memory.copy_(lens)}


@kind("chunks that begin after 128 tokens begin a block late")
@attrs.frozen(kw_only=True)
class _LateChunks(ChunkedLocal):
    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        wrapped = super().__call__(metadata)
        if wrapped is metadata or int(metadata.seq_lens_cpu.max()) < 160:
            return wrapped
        return attrs.evolve(wrapped, block_table=wrapped.block_table.roll(1, 1))


@kind("a wrapper is wrong every thousandth time", missed="the kit runs few steps")
@attrs.frozen(kw_only=True)
class _Seldom(RightWrapper):
    calls: ClassVar[list[int]] = [0]

    def change(self, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        self.calls[0] += 1
        return {"block_table": metadata.block_table.roll(1, 1)} if self.calls[0] % 10**6 == 0 else {}
