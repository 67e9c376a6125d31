"""Copies whole pages, any number of them in one launch; the source, the target, or both may be scattered.

A copy engine copies one contiguous range at a time. To move many small pages to a host store or another pool, the
kernel first gathers them side by side, or scatters them afterwards. It can also read and write pinned host memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvframe_kernels.triton.launch import Launch

_WORD = torch.int64
_BLOCK = 2048
"""Words that one program copies."""


def copy_pages(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    *,
    num_pages: int,
    page_bytes: int,
    id_bytes: int,
) -> None:
    """Copy pages byte by byte.

    Args:
        source: ``[num_bytes], uint8, device``.
        target: ``[num_bytes], uint8, device``, not overlapping ``source``; written to. Its pages must not overlap.
        source_ids: ``[num_pages], int64, device``: page ``i`` begins ``source_ids[i] * id_bytes`` into ``source``. None
            if the pages lie side by side.
        target_ids: Likewise for ``target``.
        num_pages: The number of pages to copy.
        page_bytes: Bytes of a page, a multiple of 8.
        id_bytes: Bytes from one id to the next, a multiple of 8.
    """
    if num_pages:
        arguments = source, target, source_ids, target_ids
        copy_launch(*arguments, num_pages=num_pages, page_bytes=page_bytes, id_bytes=id_bytes).run()


def copy_launch(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    *,
    num_pages: int,
    page_bytes: int,
    id_bytes: int,
) -> Launch:
    """Return the launch of ``copy_pages``."""
    words = page_bytes // _WORD.itemsize
    arguments = {
        "source": _in_words(source),
        "target": _in_words(target),
        "source_ids": source_ids,
        "target_ids": target_ids,
        "num_words": words,
        "id_words": id_bytes // _WORD.itemsize,
        "BLOCK": _BLOCK,
    }
    return Launch(_copy, (num_pages, triton.cdiv(words, _BLOCK)), arguments)


def copy_pages_reference(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    *,
    num_pages: int,
    page_bytes: int,
    id_bytes: int,
) -> None:
    """Compute ``copy_pages`` in plain torch."""
    for index in range(num_pages):
        start = index * page_bytes if source_ids is None else int(source_ids[index]) * id_bytes
        target_start = index * page_bytes if target_ids is None else int(target_ids[index]) * id_bytes
        target.narrow(0, target_start, page_bytes).copy_(source.narrow(0, start, page_bytes))


def _in_words(memory: torch.Tensor) -> torch.Tensor:
    return memory[: memory.numel() // _WORD.itemsize * _WORD.itemsize].view(_WORD)


@triton.jit
def _copy(source, target, source_ids, target_ids, num_words, id_words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    page = tl.program_id(0).to(tl.int64)
    source_start = page * num_words
    target_start = page * num_words
    # A pool may have more words than 32 bits can count.
    if source_ids is not None:
        source_start = tl.load(source_ids + page) * id_words
    if target_ids is not None:
        target_start = tl.load(target_ids + page) * id_words
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    tl.store(target + target_start + word, tl.load(source + source_start + word, mask=inside), mask=inside)
