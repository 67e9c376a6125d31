"""Hosts for the kit: kvframe's own engine, and one that differs from it in all that the contract leaves open."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import attrs
import numpy as np
import torch

from kvframe.cache.manager import KVCacheManager
from kvframe.contract.formats import PLAIN, StateTensor
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.slots import Slots
from kvframe_testing.case import Case
from kvframe_testing.laws import ConformanceError
from kvframe_testing.sample import sample

_SPARE_PAGES = 4
"""Pages of the other host that no request owns, besides the null page."""
_MORE_COLUMNS = 3
"""Columns of its block tables after the last block of the longest request."""
_MORE_TOKENS = 5
"""By how much its upper bounds of lengths are too high."""
_GARBAGE = 0x3FFFFFFF
"""What it writes over its own copies of a step after the metadata is built."""


@attrs.frozen(eq=False)
class Memory:
    """The memory of a case's layer.

    Attributes:
        pool: ``[num_bytes], uint8, device``: all of it; ``[num_pages, page_bytes]`` if there are gaps between pages.
        views: By layer, its state tensors by name, views of the pool.
    """

    pool: torch.Tensor
    views: Mapping[str, Mapping[str, torch.Tensor]]


class Host:
    """kvframe's own engine: pages as its planner lays them out, exact lengths, and a new tensor for each output.

    Attributes:
        has_own_pages: Whether it has pages of its own, makes a step's metadata on the device, and gives negative slots.
    """

    has_own_pages = False

    def begin(self, case: Case, manager: KVCacheManager, device: torch.device) -> Memory:
        """Return the memory of a case, for a host with pages of its own."""
        raise NotImplementedError

    def slots(self, flat: torch.Tensor, block_size: int) -> Slots:
        """Return where it stores tokens that kvframe's engine would store in these slots, ``[num_tokens], int64``."""
        return Slots(flat, block_size)

    def metadata(self, metadata: CommonAttentionMetadata, *, exact: bool) -> CommonAttentionMetadata:
        """Return a step's metadata as it makes it; with upper bounds of lengths unless ``exact``."""
        return metadata

    def turns(self, num_tokens: int) -> Iterator[torch.Tensor]:
        """Yield which tokens it stores at a time, ``[num_tokens], bool, host``."""
        yield torch.ones(num_tokens, dtype=torch.bool)

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return queries, keys or values, ``[num_tokens, num_heads, size], device``, as it hands them over."""
        return tensor

    def make_output(self, shape: Sequence[int], query: torch.Tensor) -> torch.Tensor | None:
        """Return where it wants the output, in the query's dtype; None for a new tensor."""
        return None

    def take_output(self, values: torch.Tensor) -> None:
        """Take what the backend returned; raise ``ConformanceError`` if it wrote beside the last output."""

    def lend(self, common: CommonAttentionMetadata) -> tuple[CommonAttentionMetadata, Callable[[], None]]:
        """Return metadata for a builder, and what the host does when the builder has finished."""
        return common, lambda: None


KVFRAME = Host()


class OtherHost(Host):
    """A host that differs from kvframe's engine in all that the contract leaves open.

    Its pages have numbers from 0 on and one of the ``LAYOUTS``; rows of queries, keys and values have gaps between
    them; slots of padded tokens are negative, and it stores a step's tokens in two turns, each of which skips every
    second token; entries of block tables after a request's last block are those of other pages; lengths on the host are
    upper bounds if the builder takes these; its copies of the step on the host are overwritten when the builder has
    finished; and it says where it wants the output.

    Attributes:
        layout: The name of its layout.
        num_outputs: The outputs that it asked for.
        num_copies: Those of them that it had to copy, because the backend returned another tensor.
    """

    has_own_pages = True

    def __init__(self, layout: str) -> None:
        """Take the name of one of the ``LAYOUTS``."""
        self.layout = layout
        self._around = self._output = torch.empty(0)
        self.num_outputs = self.num_copies = 0

    def begin(self, case: Case, manager: KVCacheManager, device: torch.device) -> Memory:
        """Return memory in its layout, for the pages that requests have and a few more."""
        ids = np.unique(manager.tables[0].ids)
        ids = ids[ids != 0]
        self._num_pages = 1 + len(ids) + _SPARE_PAGES
        # The last page is a spare one: a negative slot that is taken for one from the end is in it.
        numbers = np.random.default_rng(len(ids)).permutation(np.arange(1, self._num_pages - 1))[: len(ids)]
        page_of = np.zeros(1 + ids.max(initial=0), dtype=np.int64)
        page_of[ids] = numbers
        self._page_of = torch.from_numpy(page_of).to(device)
        pool, views = LAYOUTS[self.layout](case.spec.state_tensors(), self._num_pages, device)
        return Memory(pool, {case.layer.name: views})

    def slots(self, flat: torch.Tensor, block_size: int) -> Slots:
        """Return the slots in its own pages; -1 for a token of the null page."""
        page = self._page_of[flat // block_size]
        return Slots(torch.where(page == 0, -1, page * block_size + flat % block_size), block_size)

    def metadata(self, metadata: CommonAttentionMetadata, *, exact: bool) -> CommonAttentionMetadata:
        """Return metadata with its own pages, stale entries and negative slots."""
        table = self._page_of[metadata.block_table.long()]
        num_reqs, width = table.shape
        columns = torch.arange(width + _MORE_COLUMNS, device=table.device)
        stale = 1 + (columns + torch.arange(num_reqs, device=table.device)[:, None]) % (self._num_pages - 1)
        num_blocks = -(-metadata.seq_lens.long() // metadata.block_size)
        padded_table = torch.cat([table, table.new_zeros(num_reqs, _MORE_COLUMNS)], dim=1)
        table = torch.where(columns < num_blocks[:, None], padded_table, stale)
        changed_metadata = attrs.evolve(
            metadata,
            block_table=table.to(metadata.block_table.dtype),
            slot_mapping=self.slots(metadata.slot_mapping, metadata.block_size).flat,
        )
        if exact:
            return changed_metadata
        return attrs.evolve(
            changed_metadata,
            seq_lens_cpu=metadata.seq_lens_cpu + _MORE_TOKENS,
            max_seq_len=metadata.max_seq_len + _MORE_TOKENS,
            exact_lens=False,
        )

    def turns(self, num_tokens: int) -> Iterator[torch.Tensor]:
        """Yield every second token, and then the others."""
        for turn in range(2):
            yield torch.arange(num_tokens) % 2 != turn

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same rows with a gap after each, as parts of a common projection have them."""
        num_rows, *shape = tensor.shape
        length = math.prod(shape)
        apart = tensor.new_full((num_rows, length + 8), float("nan"))
        apart[:, :length] = tensor.reshape(num_rows, length)
        return apart[:, :length].view(tensor.shape)

    def make_output(self, shape: Sequence[int], query: torch.Tensor) -> torch.Tensor:
        """Return memory for the output, between two more rows."""
        self._around = query.new_full((shape[0] + 2, *shape[1:]), 7)
        self._output = self._around[1:-1]
        return self._output

    def take_output(self, values: torch.Tensor) -> None:
        """Count the output, and its copy; raise ``ConformanceError`` if one of these rows was written to."""
        self.num_outputs += 1
        self.num_copies += values is not self._output
        if bool((self._around[[0, -1]] != 7).any()):
            raise ConformanceError("it wrote beside the output that the host asked for")

    def lend(self, common: CommonAttentionMetadata) -> tuple[CommonAttentionMetadata, Callable[[], None]]:
        """Return the metadata with copies of all host tensors, which are overwritten afterwards."""
        copies = {
            name: getattr(common, name).clone()
            for name in ("query_start_loc_cpu", "seq_lens_cpu", "generating_indices_cpu")
            if getattr(common, name) is not None
        }
        extensions = {
            name: extension
            if extension.values_cpu is None
            else attrs.evolve(extension, values_cpu=extension.values_cpu.clone())
            for name, extension in common.extensions.items()
        }

        def take_back() -> None:
            for tensor in [*copies.values(), *(extension.values_cpu for extension in extensions.values())]:
                if tensor is not None:
                    tensor.fill_(_GARBAGE)

        return attrs.evolve(common, **copies, extensions=extensions), take_back


def in_other_hosts(cases: Sequence[Case]) -> Iterator[tuple[Case, OtherHost]]:
    """Yield a sample of cases in which every trait occurs, each with another host.

    The layouts take turns. Each occurs at least once with keys and values, or another state, in the plain format.
    """
    sampled_cases = sample(cases, ())
    plain = [case for case in sampled_cases if case.spec.kv_format == PLAIN]
    formatted = [case for case in sampled_cases if case.spec.kv_format != PLAIN]
    for part, num_cases in ((plain, max(len(plain), len(LAYOUTS))), (formatted, len(formatted))):
        for case, layout in itertools.islice(zip(itertools.cycle(part), itertools.cycle(LAYOUTS)), num_cases):
            yield case, OtherHost(layout)


# --- layouts ----------------------------------------------------------------------------------------------------------

State = Mapping[str, StateTensor]
Views = dict[str, torch.Tensor]
Layout = Callable[[State, int, torch.device], tuple[torch.Tensor, Views]]
"""Returns the pool, as ``Memory`` has it, and the state tensors in it, for so many pages."""


def _apart(
    state: State, num_pages: int, device: torch.device, *, heads_first: bool = False
) -> tuple[torch.Tensor, Views]:
    """Lay out all pages of one state tensor after all pages of another, as in ``[2, num_blocks, …]``."""
    num_bytes = num_pages * sum(_padded_bytes(tensor) for tensor in state.values())
    pool, views, offset = torch.empty(num_bytes, dtype=torch.uint8, device=device), {}, 0
    for name, tensor in state.items():
        part = pool[offset : offset + num_pages * tensor.num_bytes].view(getattr(torch, tensor.dtype))
        views[name] = _viewed(part, (num_pages, *tensor.shape), heads_first)
        offset += num_pages * _padded_bytes(tensor)
    return pool, views


def _viewed(part: torch.Tensor, shape: tuple[int, ...], heads_first: bool) -> torch.Tensor:
    """Return memory as a tensor ``[num_pages, block_size, num_heads, …]``, whose heads may lie before its tokens."""
    if not heads_first or len(shape) < 4:
        return part.view(shape)
    return part.view(shape[0], shape[2], shape[1], *shape[3:]).transpose(1, 2)


def _by_page(state: State, num_pages: int, device: torch.device) -> tuple[torch.Tensor, Views]:
    """Lay out all state tensors of a page together, as in ``[num_blocks, 2, …]``."""
    page_bytes = sum(_padded_bytes(tensor) for tensor in state.values())
    pages = torch.empty(num_pages, page_bytes, dtype=torch.uint8, device=device)
    return pages.view(-1), _views_of(pages, state)


def _far_apart(state: State, num_pages: int, device: torch.device) -> tuple[torch.Tensor, Views]:
    """Lay them out likewise, with such gaps that the last third of the pages lies after the first 2³¹ elements.

    Elements are then numbered by more than 32 bits, as in the memory of a large GPU. On a processor, memory that is
    never touched is never taken. A device without as much memory has the pages side by side.
    """
    page_bytes = sum(_padded_bytes(tensor) for tensor in state.values())
    widest = max(getattr(torch, tensor.dtype).itemsize for tensor in state.values())
    stride = max(page_bytes, -(-(widest << 31) // (2 * num_pages // 3 * 64)) * 64)
    num_bytes = stride * (num_pages - 1) + page_bytes
    if device.type == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)
    else:
        try:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return _by_page(state, num_pages, device)
    pages = memory.as_strided((num_pages, page_bytes), (stride, 1))
    return pages, _views_of(pages, state)


def _views_of(pages: torch.Tensor, state: State) -> Views:
    """Return the state tensors of pages, ``[num_pages, page_bytes], uint8, device``."""
    views, offset = {}, 0
    for name, tensor in state.items():
        part = pages[:, offset : offset + tensor.num_bytes].view(getattr(torch, tensor.dtype))
        views[name] = part.unflatten(1, tensor.shape)
        offset += _padded_bytes(tensor)
    return views


def _interleaved(
    state: State, num_pages: int, device: torch.device, *, heads_first: bool = False
) -> tuple[torch.Tensor, Views]:
    """Lay out the vectors of all state tensors one after the other for each token and head, as in ``[…, K | V]``."""
    outer = {tensor.shape[:-1] for tensor in state.values()}
    if len(outer) > 1 or len({tensor.dtype for tensor in state.values()}) > 1:
        return _by_page(state, num_pages, device)
    sizes = [tensor.shape[-1] for tensor in state.values()]
    dtype = getattr(torch, next(iter(state.values())).dtype)
    shape = num_pages, *outer.pop(), sum(sizes)
    pool = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device)
    vectors = _viewed(pool.view(dtype), shape, heads_first)
    return pool, dict(zip(state, vectors.split(sizes, dim=-1), strict=True))


def _padded_bytes(tensor: StateTensor) -> int:
    return -(-tensor.num_bytes // 64) * 64


LAYOUTS: Mapping[str, Layout] = {
    "apart": _apart,
    "head_major": partial(_apart, heads_first=True),
    "by_page": _by_page,
    "far_apart": _far_apart,
    "interleaved": _interleaved,
    "head_major_interleaved": partial(_interleaved, heads_first=True),
}
"""How another host's memory may be laid out, by name; in ``head_major`` ones, heads lie before the tokens of a page."""
