"""Leaves rows out of a model's last layers, by hooks that slice these layers' inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from kvframe.contract import ModelError
from kvframe_transformers.routing import RunningStep, running_step

_Cut = Callable[[nn.Module, Any, dict[str, Any]], "tuple[Any, dict[str, Any]] | None"]


def blocks_from(
    model: nn.Module, attention: Sequence[str], skipped_paths: Sequence[str]
) -> tuple[nn.Module, ...] | None:
    """Return the blocks of a model from the first skipped attention layer on.

    A block is an element of a ``ModuleList``. Blocks before the list's first skipped layer compute all rows, later ones
    compute the kept rows.

    Args:
        model: The model.
        attention: Paths of all its attention layers, in the order they run.
        skipped_paths: The attention layers that are to compute only some rows.

    Returns:
        The blocks; None if rows cannot be left out there: an attention layer that computes all rows runs later or in
        one of these blocks, or a skipped one is in no such block.
    """
    if not skipped_paths or tuple(attention[-len(skipped_paths) :]) != tuple(skipped_paths):
        return None
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    indices_by_path = {path: _place(path, lists) for path in attention}
    skipped_indices = [indices_by_path[path] for path in skipped_paths]
    within = skipped_indices[0]
    if within is None or any(block_index is None or block_index[0] != within[0] for block_index in skipped_indices):
        return None
    list_path, first = within[0], min(block_index[1] for block_index in skipped_indices if block_index is not None)
    for path in attention[: -len(skipped_paths)]:
        block_index = indices_by_path[path]
        if block_index is not None and block_index[0] == list_path and block_index[1] >= first:
            return None
    return tuple(lists[list_path])[first:]


def _place(path: str, lists: Mapping[str, nn.ModuleList]) -> tuple[str, int] | None:
    """Return the path of the innermost list that contains ``path``, and the index of the module in it."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 1, -1):
        list_path = ".".join(parts[: length - 1])
        if list_path in lists:
            return list_path, int(parts[length - 1])
    return None


class RowCutter:
    """Hooks on blocks: in a step that keeps only some rows, inputs with a row per token are sliced before a block runs.

    A compiler traces the hooks into the code for such steps, inside ``traced``. The code serves any number of rows, and
    as many as there are tokens too. So a block's input counts as cut if it is the output of the block before.

    Invariant: if no step runs, or the step keeps all rows, the hooks change nothing.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        """Hook ``blocks``, in the order they run."""
        self._first = blocks[0]
        self._cut_already: tuple[torch.Tensor, ...] = ()
        self._traced: tuple[torch.Tensor, int] | None = None
        self._cut_uncompiled: _Cut = torch.compiler.disable(self._cut_in_step)
        self._handles: list[RemovableHandle] = []
        for block in blocks:
            self._handles += [
                block.register_forward_pre_hook(self._cut_inputs, with_kwargs=True),
                block.register_forward_hook(self._note_output),
            ]

    def remove(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def traced(self, rows: torch.Tensor, num_tokens: int) -> Iterator[None]:
        """Let the hooks leave rows out in what a compiler traces inside the block.

        Args:
            rows: ``[num_kept], int64, device``: the rows that are kept.
            num_tokens: The packed tokens.
        """
        self._traced = rows, num_tokens
        try:
            yield
        finally:
            self._traced, self._cut_already = None, ()

    def _cut_inputs(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not torch.compiler.is_compiling():
            return self._cut_in_step(block, args, kwargs)
        if self._traced is None:
            return None
        if block is self._first:
            self._cut_already = ()
        elif not self._has_output(args, kwargs):
            # Only the running step shows whether its rows can be distinguished.
            return self._cut_uncompiled(block, args, kwargs)
        return self._cut_all(args, kwargs, *self._traced)

    def _cut_in_step(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        step = running_step()
        if step is None or step.kept_rows is None:
            return None
        if block is self._first:
            self._cut_already = ()
        elif _is_ambiguous(step) and not self._has_output(args, kwargs):
            raise ModelError(
                f"{type(block).__name__} does not get the output of the block before it, so rows that were cut "
                "cannot be distinguished from others; turn prefill skipping off for this model"
            )
        return self._cut_all(args, kwargs, step.kept_rows, len(step.positions))

    def _cut_all(
        self, args: Any, kwargs: dict[str, Any], rows: torch.Tensor, num_tokens: int
    ) -> tuple[Any, dict[str, Any]]:
        return self._cut(args, rows, num_tokens), {
            name: self._cut(value, rows, num_tokens) for name, value in kwargs.items()
        }

    def _note_output(self, block: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            if self._traced is not None:
                self._cut_already = tuple(_tensors(output))
            return
        step = running_step()
        if step is not None and _is_ambiguous(step):
            self._cut_already = tuple(_tensors(output))

    def _has_output(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        return any(
            tensor is cut_tensor for tensor in _tensors((*args, *kwargs.values())) for cut_tensor in self._cut_already
        )

    def _cut(self, value: Any, rows: torch.Tensor, num_tokens: int) -> Any:
        """Return the kept rows of a tensor with a row per packed token, or of such tensors in a tuple or list.

        The rows are the last dimension but one of floats, and the last dimension of indices.
        """
        if type(value) in (tuple, list):
            return type(value)(self._cut(item, rows, num_tokens) for item in value)
        if not isinstance(value, torch.Tensor) or any(value is cut_tensor for cut_tensor in self._cut_already):
            return value
        dim = 2 if value.is_floating_point() or value.is_complex() else 1
        if value.dim() < dim or value.shape[-dim] != num_tokens:
            return value
        return value.index_select(value.dim() - dim, rows)


def _is_ambiguous(step: RunningStep) -> bool:
    """Return whether padding makes the kept rows as many as the tokens: a shape then does not show if it was sliced."""
    # Slicing the row of a single token twice changes nothing.
    return step.kept_rows is not None and len(step.kept_rows) == len(step.positions) > 1


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else []
