"""FlexAttention (Dong et al., arXiv 2412.05496) called on gathered tokens: compiled, or over dense scores.

Two small functions, which FlexAttention compiles into its kernel, decide which tokens a query sees and how a score is
changed. Both look up the positions of tokens in their requests, so they do not depend on pages or on the batch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from kvframe.contract import BackendError, MaskFunction, QuerySpec, bias_columns
from kvframe_flex.dense import dense_flex_attention
from kvframe_flex.pages import SINK

BLOCK = 128
"""Queries, and tokens, of a block of the block mask: FlexAttention's own."""

COMPILER = "inductor"
"""The torch backend that compiles a kernel."""

WITHOUT_LSE = frozenset({"cpu"})
"""Device types whose compiled kernels return no log-sum-exp: if it is wanted, scores are computed densely."""

MIN_BLOCKS = 2
"""The fewest blocks of a block mask: with a size of one, torch would compile a separate kernel."""

Result = tuple[torch.Tensor, torch.Tensor | None]
"""``[num_tiles, num_heads, num_queries, head_size_v]``; and the log-sum-exp, ``[num_tiles, num_heads, num_queries],
float32``, if it was wanted."""

_log = logging.getLogger("kvframe")


@attrs.frozen
class Scores:
    """The changes to the scores of a group's layers.

    Attributes:
        scale: As in ``QuerySpec``.
        soft_cap: As in ``QuerySpec``.
        has_sinks: As in ``QuerySpec``.
        max_distance: The largest distance of the learned bias; None if there is none.
        has_slopes: Whether the bias is that of ALiBi.
    """

    scale: float
    soft_cap: float | None
    has_sinks: bool
    max_distance: int | None
    has_slopes: bool = False

    @classmethod
    def of(cls, query: QuerySpec) -> Scores:
        """Return the changes of a layer's query side."""
        bias = query.relative_bias
        max_distance = None if bias is None else bias.max_distance
        return cls(query.scale, query.soft_cap, query.has_sinks, max_distance, query.alibi_slopes is not None)

    @property
    def change_scores(self) -> bool:
        """Whether a score is more than the scaled product."""
        return self.soft_cap is not None or self.has_sinks or self.max_distance is not None or self.has_slopes


@attrs.frozen(eq=False)
class Places:
    """The positions of the queries and the gathered tokens of a dense batch, and the blocks of tokens that are read.

    Attributes:
        positions: ``[capacity], int32, device``: those of the tokens, tile after tile, then those of the queries; then,
            with ``has_ends``, the queries' range ends, as ``seen_with_ends`` takes them.
        sizes: ``[4], int64, device``: the start of the queries' positions, queries per tile, tokens per tile, queries.
        num_blocks: ``[num_tiles, 1, query_blocks], int32, device``: blocks of tokens that some query sees in part.
        blocks: ``[num_tiles, 1, query_blocks, key_blocks], int32, device``: the indices of these, then of the others.
        num_full_blocks: The same shape as ``num_blocks``: blocks that all queries see completely.
        full_blocks: Likewise, the indices.
        has_ends: Whether queries see more than the mask function shows.
    """

    positions: torch.Tensor
    sizes: torch.Tensor
    num_blocks: torch.Tensor
    blocks: torch.Tensor
    num_full_blocks: torch.Tensor
    full_blocks: torch.Tensor
    has_ends: bool = False


class Kernel:
    """Attention of one group's layers over the dense batches of a step.

    Invariants: each kind of dense batch has its own code object, so that later kinds do not reach torch's limit of
    compiled variants per code object, after which torch runs the code uncompiled. Every compilation, for any reason,
    runs inside ``_compiling``.
    """

    def __init__(self, sees: MaskFunction, scores: Scores, device: torch.device, compile_mode: str) -> None:
        """Keep the properties of the layers.

        Args:
            sees: Their mask function.
            scores: The changes to their scores.
            device: The device of the layers.
            compile_mode: ``auto``, ``always`` or ``never``.

        Raises:
            BackendError: The mode is ``always``, and there is no compiler.
        """
        self._sees = sees
        self._scores = scores
        missing = "" if compile_mode == "never" else missing_compiler(device)
        if missing and compile_mode == "always":
            raise BackendError(f"FlexAttention cannot be compiled here: {missing}")
        if missing:
            _say_uncompiled(missing)
        self._may_fail = compile_mode == "auto"
        self._is_compiled = compile_mode != "never" and not missing
        self._compiles_lse = device.type not in WITHOUT_LSE
        self._compiled: dict[tuple[Any, ...], Callable[..., Result]] = {}

    @property
    def is_compiled(self) -> bool:
        """Whether calls run compiled code."""
        return self._is_compiled

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        places: Places,
        causal: bool,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
        with_lse: bool,
    ) -> Result:
        """Return attention of a dense batch.

        Args:
            query: ``[num_tiles, num_heads, num_queries, head_size], device``.
            key: ``[num_tiles, num_kv_heads, num_keys, head_size], device``.
            value: ``[num_tiles, num_kv_heads, num_keys, head_size_v], device``.
            places: The positions and the blocks.
            causal: Whether the mask function applies; if not, queries see all tokens that are not hidden.
            bias: ``[num_heads, 2 * max_distance + 1], device``: the learned bias by distance; with ``has_slopes``
                ``[num_heads], device``, the slopes; None for none.
            sinks: ``[num_heads], device``: the learned sink logits; None for none.
            with_lse: Whether the log-sum-exp is wanted.

        Raises:
            BackendError: The mode is ``always``, and the compilation failed.
        """
        arguments = query, key, value, places, causal, bias, sinks, with_lse
        if self._is_compiled and (self._compiles_lse or not with_lse):
            # torch compiles a separate kernel for each of these.
            numbers = len(query) == 1, query.shape[2] == 1, len(places.positions)
            kind = *numbers, causal, places.has_ends, query.dtype, sinks is None, with_lse
            try:
                return self._run_compiled(kind, arguments)
            except Exception as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                reason = ": ".join([type(error).__name__, *lines[:1]])
                if not self._may_fail:
                    raise BackendError(f"compiling FlexAttention failed: {reason}") from error
                _say_uncompiled(reason)
                self._is_compiled = False
        return self._run_densely(*arguments)

    def _run_densely(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        places: Places,
        causal: bool,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
        with_lse: bool,
    ) -> Result:
        functions = self._functions(places, causal, bias, sinks)
        blocks = _chosen(places.num_blocks, places.blocks), _chosen(places.num_full_blocks, places.full_blocks)
        # Dense batches for compiled kernels have as many pairs as the scores of one KV head may be.
        group = query.shape[1] // key.shape[1]
        heads_at_once = 1 if self._is_compiled else key.shape[1]
        outputs, lses = [], []
        for first in range(0, key.shape[1], heads_at_once):
            part = slice(first, first + heads_at_once)
            some = query[:, first * group : (first + heads_at_once) * group], key[:, part], value[:, part]
            output, lse = dense_flex_attention(*some, *functions, *blocks, BLOCK, self._scores.scale, first * group)
            outputs.append(output)
            lses.append(lse)
        if len(outputs) == 1:
            return outputs[0], lses[0] if with_lse else None
        return torch.cat(outputs, dim=1), torch.cat(lses, dim=1) if with_lse else None

    def _run_compiled(self, kind: tuple[Any, ...], arguments: tuple[Any, ...]) -> Result:
        from torch._dynamo.exc import TorchDynamoException

        compiled = self._compiled.get(kind)
        if compiled is not None:
            # torch recompiles a known kind if something else changes, such as whether gradients are required.
            with contextlib.suppress(TorchDynamoException):
                return compiled(*arguments)
        else:
            if not self._compiled:
                _log.info(
                    "kvframe-flex: compiling FlexAttention for this mask, up to a minute at the first start on a "
                    'machine and seconds later; compile = "never" computes all scores instead'
                )
            compiled = self._compile()
        with _compiling():
            result = compiled(*arguments)
        self._compiled[kind] = compiled
        return result

    def _compile(self) -> Callable[..., Result]:
        """Return the kernel for one more kind of dense batch; it is compiled when it is first called."""

        def attend(*arguments: Any) -> Result:
            return self._attend(*arguments)

        # torch keeps compiled code with the code object, which would be shared by all functions made here.
        attend.__code__ = attend.__code__.replace()
        # With fullgraph, torch raises if it cannot compile, instead of running the code uncompiled.
        return torch.compile(attend, dynamic=True, fullgraph=True, backend=_compile_graph)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        places: Places,
        causal: bool,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
        with_lse: bool,
    ) -> Result:
        score, is_seen = self._functions(places, causal, bias, sinks)
        block_mask = BlockMask.from_kv_blocks(
            places.num_blocks,
            places.blocks,
            places.num_full_blocks,
            places.full_blocks,
            BLOCK_SIZE=BLOCK,
            mask_mod=is_seen,
            seq_lengths=(query.shape[2], key.shape[2]),
            compute_q_blocks=False,
        )
        result = flex_attention(
            query,
            key,
            value,
            score_mod=score,
            block_mask=block_mask,
            scale=self._scores.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            return_aux=AuxRequest(lse=True) if with_lse else None,
        )
        if isinstance(result, torch.Tensor):
            return result, None
        output, further = result
        return output, further.lse

    def _functions(
        self, places: Places, causal: bool, bias: torch.Tensor | None, sinks: torch.Tensor | None
    ) -> tuple[Callable[..., Any] | None, Callable[..., Any]]:
        """Return the function that changes a score, or None, and the one that says whether a query sees a token."""
        sees, scores, positions, sizes = self._sees, self._scores, places.positions, places.sizes

        def position_of_query(tile: Any, index: Any) -> Any:
            return positions[sizes[0] + tile * sizes[1] + index]

        def position_of_key(tile: Any, index: Any) -> Any:
            return positions[tile * sizes[2] + index]

        def is_seen(tile: Any, head: Any, query_index: Any, key_index: Any) -> Any:
            position = position_of_key(tile, key_index)
            seen = position >= 0
            if causal and places.has_ends:
                place = sizes[0] + tile * sizes[1] + query_index
                seen = seen & seen_with_ends(sees, positions[place], position, positions[place + sizes[3]])
            elif causal:
                seen = seen & sees(position_of_query(tile, query_index), position)
            return seen | (position == SINK) if scores.has_sinks else seen

        def score(value: Any, tile: Any, head: Any, query_index: Any, key_index: Any) -> Any:
            if scores.soft_cap is not None:
                value = scores.soft_cap * torch.tanh(value / scores.soft_cap)
            position = position_of_key(tile, key_index)
            if bias is not None and scores.max_distance is not None:
                distance = position - position_of_query(tile, query_index)
                value = value + bias[head, bias_columns(distance, scores.max_distance)]
            if bias is not None and scores.has_slopes:
                value = value - bias[head] * (position - position_of_query(tile, query_index)).abs()
            if scores.has_sinks:
                # Another part of the keys may have the sinks. Then the slot of the sink is hidden in every block.
                logit = -math.inf if sinks is None else sinks[head]
                value = torch.where(position == SINK, logit, value)
            return value

        return score if scores.change_scores else None, is_seen


def seen_with_ends(sees: MaskFunction, query: Any, key: Any, range_end: Any) -> Any:
    """Return whether queries see keys, which are also seen up to the end of a range.

    Args:
        sees: A causal mask function.
        query: Positions of queries.
        key: Positions of keys.
        range_end: A query sees all later keys before this one.
    """
    return sees(query, key) | ((key > query) & (key < range_end))


def missing_compiler(device: torch.device) -> str:
    """Return what is missing to compile for a device, in a few words; empty if nothing is."""
    if device.type == "cuda":
        return "" if importlib.util.find_spec("triton") else "Triton is not installed"
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()
    except Exception as error:  # torch raises different errors if there is no compiler
        return str(error).strip().splitlines()[0] if str(error).strip() else "no C++ compiler was found"
    return ""


def find_blocks(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which blocks of tokens queries see, as the last four attributes of ``Places``.

    Args:
        seen: ``[num_tiles, num_queries, num_keys], bool, device``.
    """
    num_tiles, num_queries, num_keys = seen.shape
    query_blocks, key_blocks = (max(MIN_BLOCKS, -(-size // BLOCK)) for size in (num_queries, num_keys))
    columns = torch.nn.functional.pad(seen, (0, key_blocks * BLOCK - num_keys))
    columns = columns.view(num_tiles, num_queries, key_blocks, BLOCK)
    rows = 0, 0, 0, query_blocks * BLOCK - num_queries
    # Padding rows see the same tokens as the other rows.
    some = torch.nn.functional.pad(columns.any(-1), rows).view(num_tiles, query_blocks, BLOCK, key_blocks).any(2)
    full = torch.nn.functional.pad(columns.all(-1), rows, value=True)
    full = full.view(num_tiles, query_blocks, BLOCK, key_blocks).all(2) & some
    return *_in_front(some & ~full), *_in_front(full)


def _in_front(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of chosen blocks of each row, and all block indices with the chosen ones first."""
    counts = chosen.sum(-1, dtype=torch.int32)[:, None]
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return counts, order.to(torch.int32)[:, None]


def _chosen(counts: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return which blocks come first, ``bool``, in the shape of ``blocks``: the inverse of ``_in_front``."""
    is_chosen = torch.arange(blocks.shape[-1], device=blocks.device) < counts[..., None]
    return torch.empty_like(is_chosen).scatter_(-1, blocks.long(), is_chosen)


def keep_static(*tensors: torch.Tensor) -> None:
    """Let the compiler take the sizes of tensors as constants.

    The tensors that the two functions read need this: torch 2.13's CPU template confuses the names of other sizes.
    """
    for tensor in tensors:
        torch._dynamo.mark_static(tensor)


def _say_uncompiled(reason: str) -> None:
    _log.warning("kvframe-flex: FlexAttention runs without being compiled, which is slow (%s)", reason)


def _compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph that torch traced; raise if it was traced outside of ``_compiling``."""
    from torch._dynamo import lookup_backend
    from torch.fx.experimental import _config as shapes_config

    if shapes_config.use_duck_shape:
        raise RuntimeError("a kernel was traced outside of _compiling, so sizes that are equal by chance count as one")
    compiled: Callable[..., Any] = lookup_backend(COMPILER)(graph, inputs)
    return compiled


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Let the compiler distinguish sizes that happen to be equal, and treat other numbers as constants.

    The numbers of a mask function are part of the kernel. Deprecation warnings of torch about itself are suppressed.
    """
    from torch._dynamo import config as dynamo_config
    from torch.fx.experimental import _config as shapes_config

    configs: tuple[Any, Any] = shapes_config, dynamo_config
    with (
        configs[0].patch(use_duck_shape=False),
        configs[1].patch(specialize_int=True, specialize_float=True),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield
