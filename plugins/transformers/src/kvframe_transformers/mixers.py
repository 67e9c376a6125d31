"""Runs state mixers over an engine's pages: one sequence is all that they know, and a step holds many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kvframe.attention.state import StateRound, StateRun
from kvframe.errors import ModelError
from kvframe_transformers.routing import RunState, running_step
from kvframe_transformers.self_check import relative_difference, tolerance_of
from kvframe_transformers.states import Forward, MixerCall, Numbers, StateView

_CHECK_TOKENS = 6


class MixerDriver:
    """Stands for a mixer's forward while its model is attached.

    The single tokens of all requests are one batch; the tokens of a prompt are a sequence, run in as many pieces as
    states of it are kept. A mixer that cannot continue a sequence by several tokens at once continues it token by
    token.
    """

    def __init__(self, name: str, module: nn.Module, forward: Forward, layer: RunState) -> None:
        """Take a mixer and the layer that has its pages.

        Args:
            name: The layer's name.
            module: The mixer.
            forward: Its own forward.
            layer: The engine's layer.

        Raises:
            ModelError: The mixer takes no cache.
        """
        self._name = name
        self._module = module
        call = MixerCall.of(module)
        if call is None:
            raise self._refusal("takes no cache for the state that it keeps")
        self._call = call
        self._forward = forward
        self._layer = layer
        self._continues = True
        self._numbers: Numbers = ((), ())
        self._hidden_size = 0

    def note(self, num_rows: dict[str, int], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the mixer without a state, and note how many rows it gives; raises ``ModelError`` if it gives none."""
        output = self._forward(*args, **kwargs)
        if not isinstance(output, torch.Tensor):
            raise self._refusal("returns more than its tokens")
        self._hidden_size = self._call.tokens_of(args, kwargs).shape[-1]
        num_rows[self._name] = output.shape[1]
        return output

    def check(self) -> None:
        """See that a sequence in pieces gives what the whole gives, and whether a piece may be longer than a token.

        Called after ``note``.

        Raises:
            ModelError: The mixer's states are not those that were planned, or are not all that it keeps.
        """
        parameter = next(self._module.parameters())
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(1, _CHECK_TOKENS, self._hidden_size, generator=generator).to(parameter)
        half = _CHECK_TOKENS // 2
        with torch.inference_mode():
            view = StateView()
            whole = self._run(tokens, view, {})[:, half:]
            self._numbers = view.numbers
            self._check_planned(view.named(), tokens.dtype)
            tolerance = tolerance_of(tokens.dtype)
            self._continues = (
                self._reads_its_states(tokens) and relative_difference(self._in_two(tokens), whole) <= tolerance
            )
            difference = relative_difference(self._in_two(tokens), whole)
        if difference > tolerance:
            raise self._refusal(
                f"gives other outputs where it continues a sequence than for the whole (relative difference "
                f"{difference:.1e}, allowed {tolerance:.1e}), so it keeps more than transformers' cache shows"
            )

    def _check_planned(self, states: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        found = {key: (tuple(state.shape[1:]), state.dtype) for key, state in states.items()}
        planned = {key: (tuple(pages.shape[2:]), pages.dtype) for key, pages in self._layer.pages.items()}
        if dtype == torch.float64:  # pages of what is always float32 otherwise stay so
            found, planned = ({key: (shape, dtype) for key, (shape, _) in each.items()} for each in (found, planned))
        if found != planned:
            raise ModelError(
                f"layer {self._name!r} ({type(self._module).__name__}) keeps {_in_words(found)}, and was planned with "
                f"{_in_words(planned)}; its checkpoint and its config do not belong together"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the step's tokens, ``[1, num_tokens, hidden_size]``; the states go to their pages."""
        if running_step() is None:
            raise ModelError(
                f"{type(self._module).__name__} ran outside of the engine that it is attached to; close the engine (or "
                "detach the model) before calling the model directly"
            )
        tokens, others = self._call.tokens_of(args, kwargs), self._call.others_of(args, kwargs)
        step = self._layer.step
        if not step.runs and len(step.rounds) == 1 and len(step.rounds[0].rows) == tokens.shape[1]:
            return self._round(step.rounds[0], tokens.transpose(0, 1), others).transpose(0, 1)
        output: torch.Tensor | None = None
        for part in step.rounds:
            found = self._round(part, tokens[0].index_select(0, part.rows).unsqueeze(1), others)
            output = _room(tokens, found) if output is None else output
            output[0].index_copy_(0, part.rows, found[:, 0])
        for piece in step.runs:
            found = self._piece(piece, tokens[:, piece.start : piece.stop], others)
            output = _room(tokens, found) if output is None else output
            output[:, piece.start : piece.stop] = found
        assert output is not None
        return output

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"layer {self._name!r} ({type(self._module).__name__}) {why}: serving it takes a model adapter for that"
        )

    def _round(self, part: StateRound, tokens: torch.Tensor, others: Mapping[str, Any]) -> torch.Tensor:
        view = StateView.of(part.read(self._layer.pages), self._numbers)
        output = self._run(tokens, view, others)
        part.write(self._layer.pages, view.named())
        return output

    def _piece(self, piece: StateRun, tokens: torch.Tensor, others: Mapping[str, Any]) -> torch.Tensor:
        view = StateView.of(piece.read(self._layer.pages), self._numbers)
        output = self._continue(tokens, view, others)
        piece.write(self._layer.pages, view.named())
        return output

    def _continue(self, tokens: torch.Tensor, view: StateView, others: Mapping[str, Any]) -> torch.Tensor:
        if self._continues or not view.has_previous_state():
            return self._run(tokens, view, others)
        return torch.cat([self._run(token, view, others) for token in tokens.split(1, dim=1)], dim=1)

    def _run(self, tokens: torch.Tensor, view: StateView, others: Mapping[str, Any]) -> torch.Tensor:
        output: torch.Tensor = self._forward(**{self._call.tokens: tokens, self._call.cache: view}, **others)
        return output

    def _in_two(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the second half, in a run of its own."""
        view = StateView()
        half = tokens.shape[1] // 2
        self._run(tokens[:, :half], view, {})
        return self._continue(tokens[:, half:], view, {})

    def _reads_its_states(self, tokens: torch.Tensor) -> bool:
        """Return whether several tokens at once depend on every state that is there before them."""
        for name in self._states_of(tokens):
            states = self._states_of(tokens)
            states[name] = torch.full_like(states[name], torch.nan)
            if self._run(tokens[:, tokens.shape[1] // 2 :], StateView.of(states, self._numbers), {}).isfinite().all():
                return False
        return True

    def _states_of(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        view = StateView()
        self._run(tokens[:, : tokens.shape[1] // 2], view, {})
        return view.named()


def _room(tokens: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return the output of a step to be filled in; zero for padding, which nobody computes."""
    return found.new_zeros(1, tokens.shape[1], found.shape[-1])


def _in_words(states: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{key} {shape} of {str(dtype).removeprefix('torch.')}" for key, (shape, dtype) in states.items())
