"""Backends that are wrong for some shapes of a batch, of a layer, or of pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kvframe.contract.specs import LayerSpec
from tests.testing.mistakes.backend import Batch, RightBackend, WrongRequests, WrongRows
from tests.testing.mistakes.kinds import kind
from tests.testing.plain_backend import Built


def _rows(name: str, wrong_from: Callable[[Batch], int | None], missed: str = "") -> None:
    members = {"wrong_from": lambda self, batch: wrong_from(batch)}
    kind(name, missed)(type("WrongRows", (WrongRows,), members))


def _decode(index: int, batch: Batch) -> int | None:
    return index if batch.only_decodes and len(batch.seq_lens) > index else None


def _all_if(condition: Callable[[Batch], bool]) -> Callable[[Batch], int | None]:
    return lambda batch: 0 if condition(batch) else None


# --- how many requests and tokens -------------------------------------------------------------------------------------

_rows("a batch of one request", _all_if(lambda batch: len(batch.query_lens) == 1))
_rows("one prompt alone", _all_if(lambda batch: len(batch.query_lens) == 1 and batch.only_prompts))
_rows("one decode alone", _all_if(lambda batch: len(batch.query_lens) == 1 and batch.only_decodes))
_rows(
    "one prompt alone that continues",
    _all_if(lambda batch: len(batch.query_lens) == 1 and 1 < batch.query_lens[0] < batch.seq_lens[0]),
)
_rows("a batch of two decodes", _all_if(lambda batch: len(batch.query_lens) == 2 and batch.only_decodes))
_rows("the 19th request", lambda batch: sum(batch.query_lens[:18]) if len(batch.query_lens) > 18 else None)
_rows("the 33rd request", lambda batch: sum(batch.query_lens[:32]) if len(batch.query_lens) > 32 else None)
_rows(
    "the 65th decode of a step of decodes",
    lambda batch: 64 if batch.only_decodes and len(batch.seq_lens) > 64 else None,
)
_rows(
    "the 37th decode of a step of decodes",
    lambda batch: 36 if batch.only_decodes and len(batch.seq_lens) > 36 else None,
)
_rows(
    "the 129th decode of a step of decodes",
    lambda batch: 128 if batch.only_decodes and len(batch.seq_lens) > 128 else None,
)
_rows(
    "the 50th token of a step of prompts",
    lambda batch: 49 if batch.only_prompts and sum(batch.query_lens) > 150 else None,
)
_rows(
    "prompts of more than 64 tokens in a step of prompts",
    _all_if(lambda batch: batch.only_prompts and max(batch.query_lens) > 64),
)
_rows("the 257th token of a step", lambda batch: 256 if sum(batch.query_lens) > 256 else None)
_rows("the 513th token of a step", lambda batch: 512 if sum(batch.query_lens) > 512 else None)
_rows(
    "a mixed batch whose decodes come after its prompts",
    _all_if(lambda batch: batch.query_lens[0] > 1 and batch.query_lens[-1] == 1 and 1 < min(batch.seq_lens)),
)
_rows(
    "one long request beside many short ones",
    _all_if(lambda batch: max(batch.seq_lens) > 50 * min(batch.seq_lens) > 50),
)


class _LongRequests(WrongRequests):
    limit = 0

    def is_wrong(self, layer: LayerSpec, built: Built, request: int, num_new: int, seq_len: int) -> bool:
        return seq_len > self.limit


@kind("requests of more than 512 tokens")
class _Over512(_LongRequests):
    limit = 512


@kind("requests of more than 1,024 tokens")
class _Over1024(_LongRequests):
    limit = 1024


@kind("positions over 32,767", missed="a request of so many tokens takes seconds in an interpreted kernel")
class _Over32767(_LongRequests):
    limit = 32767


@kind("tables of more than 32 blocks, of 16 tokens or more")
class _ManyBlocks(WrongRequests):
    def is_wrong(self, layer: LayerSpec, built: Built, request: int, num_new: int, seq_len: int) -> bool:
        size = built.common.block_size
        return size >= 16 and seq_len > 32 * size


@kind("the longest request is not the first and the step decodes only")
class _LongestFirst(WrongRequests):
    def is_wrong(self, layer: LayerSpec, built: Built, request: int, num_new: int, seq_len: int) -> bool:
        lens = built.common.seq_lens
        return len(lens) > 40 and int(lens.argmax()) > 31 and request == int(lens.argmax())


def _has_group(size: int, batch: Batch) -> bool:
    return batch.group == size


# --- sizes of the layer -----------------------------------------------------------------------------------------------

for _size in (3, 5, 6, 7):
    _rows(f"groups of {_size} query heads", _all_if(partial(_has_group, _size)))
_rows("an odd number of KV heads, three or more", _all_if(lambda batch: batch.option("num_kv_heads") in (3, 5, 7)))
_rows("windows of more than 32 tokens", _all_if(lambda batch: batch.option("window") > 32))
_rows("windows of more than 64 tokens", _all_if(lambda batch: batch.option("window") > 64))
_rows("chunks of more than 40 tokens", _all_if(lambda batch: batch.option("chunk") > 40))
_rows("more than 20 sink tokens", _all_if(lambda batch: batch.option("num_sink_tokens") > 20))
_rows("blocks of 32 tokens", _all_if(lambda batch: batch.option("block_size") == 32))
_rows("blocks of 64 tokens", _all_if(lambda batch: batch.option("block_size") == 64))
_rows(
    "blocks of more tokens than a window",
    _all_if(lambda batch: 17 < batch.option("window") < batch.option("block_size")),
)
_rows("heads of 96 elements", _all_if(lambda batch: batch.option("head_size") == 96))
_rows("heads of 80 elements", _all_if(lambda batch: batch.option("head_size") == 80))
_rows(
    "learned sinks in a decode-only step of many requests",
    _all_if(lambda batch: bool(batch.layer.query and batch.layer.query.has_sinks) and len(batch.seq_lens) > 20),
)
_rows(
    "a soft cap in a prompt alone",
    _all_if(lambda batch: bool(batch.layer.query and batch.layer.query.soft_cap) and len(batch.seq_lens) == 1),
)


@kind("a window begins in the block before, in long requests")
class _FarWindow(RightBackend):
    def ranges(self, layer: LayerSpec, position: int) -> list[tuple[int, int]]:
        window = getattr(layer.spec, "window", None)
        right = super().ranges(layer, position)
        if window is None or position < 450 or getattr(layer.spec, "dilation", 1) > 1:
            return right
        start = max(0, position - window + 2)
        return [(max(first, start) if last > start else first, last) for first, last in right if last > start]


@kind("queries of a long prompt see one tile of 64 too many")
class _Tiles(RightBackend):
    def visible(self, layer: LayerSpec, common: object, request: int, first: int, seq_len: int) -> torch.Tensor:
        mask = super().visible(layer, common, request, first, seq_len)  # type: ignore[arg-type]
        if first == 0 and seq_len > 64 and len(mask) > 64:
            mask[64:, :1] = False
        return mask
