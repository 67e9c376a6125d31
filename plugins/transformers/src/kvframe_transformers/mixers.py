"""Runs mixers, the layers that keep a state, over an engine's pages: a mixer handles one sequence, a step has many."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvframe.contract import AttachedState, ModelError, StateRound, StateRun
from kvframe_transformers.names import if_untested
from kvframe_transformers.own_states import forward_with_states
from kvframe_transformers.paged_steps import PagedStep, kernels_run_on
from kvframe_transformers.scans import ContinuedScan
from kvframe_transformers.self_check import relative_difference, tolerance_of
from kvframe_transformers.states import (
    CallForm,
    Forward,
    Inputs,
    MixerCall,
    Numbers,
    Output,
    StateView,
    is_mixer,
    with_rows,
)

_log = logging.getLogger(__name__)
_kernels_log = logging.getLogger("transformers.integrations.hub_kernels")

_CHECK_TOKENS = 6

Change = Callable[[torch.Tensor], torch.Tensor]


def _is_of_use_on_cpu(record: logging.LogRecord) -> bool:
    """Return whether a message is another one than transformers' advice to install kernels, which run on GPUs only."""
    return "is falling back to its reference PyTorch implementation" not in record.getMessage()


class MixerDriver:
    """Stands in for a mixer's forward in a step, and computes the mixer on the states in the engine's pages.

    The single tokens of all requests are one batch. The tokens of a prompt are a sequence, which is run in as many
    parts as it has states to keep. If a mixer's scan cannot start from a state, it gets another scan that can; if that
    is not possible either, the sequence is computed token by token. If there are kernels that step the mixer's states
    in their pages, they compute single tokens.

    Attributes:
        form: The form of the mixer's calls; None before ``note``.
    """

    def __init__(self, name: str, module: nn.Module, forward: Forward, layer: AttachedState) -> None:
        """Keep a mixer and the layer with its pages.

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
        own_states_forward = None if is_mixer(module) else forward_with_states(module)
        call = MixerCall.of(module) if own_states_forward is None else MixerCall.with_own_states(module)
        if call is None:
            raise self._refusal("takes no cache for the state that it keeps")
        self._call = call
        self._forward = own_states_forward or forward
        self._layer = layer
        if all(pages.device.type == "cpu" for pages in layer.pages.values()):
            _kernels_log.addFilter(_is_of_use_on_cpu)
        self._continue: Callable[[Inputs, StateView], Output] = self._run
        self._paged_step: PagedStep | None = None
        self._numbers: Numbers = ((), ())
        self._noted: Inputs = {}
        self.form: CallForm | None = None

    def note(self, num_rows: dict[str, int], *args: Any, **kwargs: Any) -> Output:
        """Run the mixer without a state; record its arguments, and the number of rows that it returns."""
        self._noted = self._call.inputs_of(args, kwargs)
        with self._serving_cache():
            output = self._run(self._noted, StateView())
        self.form = CallForm.of(args, kwargs, self._noted[self._call.tokens], output)
        num_rows[self._name] = next(_tensors(output)).shape[1]
        return output

    def check(self) -> None:
        """Check that a sequence in two parts gives the same output as the whole, and find how to continue a sequence.

        Called after ``note``.

        Raises:
            ModelError: The mixer's states differ from the planned ones, or it keeps other state, too.
        """
        generator = torch.Generator().manual_seed(0)

        def random(noted_tensor: torch.Tensor) -> torch.Tensor:
            if not noted_tensor.is_floating_point():  # positions
                return torch.arange(_CHECK_TOKENS, dtype=noted_tensor.dtype, device=noted_tensor.device).unsqueeze(0)
            return torch.randn(1, _CHECK_TOKENS, *noted_tensor.shape[2:], generator=generator).to(noted_tensor)

        with self._serving_cache():
            self._check(_each(self._noted, random))

    @contextmanager
    def _serving_cache(self) -> Iterator[None]:
        """Raise ``ModelError`` if the mixer asks its cache for what a newer transformers added to caches."""
        try:
            yield
        except AttributeError as error:
            raise self._refusal(f"asks its cache for what kvframe's does not have ({error})") from error

    def _check(self, inputs: Inputs) -> None:
        with torch.inference_mode():
            view = StateView()
            whole = _join(self._run(inputs, view))[:, _CHECK_TOKENS // 2 :]
            self._numbers = view.numbers
            self._check_planned(view.named(), whole.dtype)
            if not whole.isfinite().all():
                self._continue = self._token_by_token  # always correct; infinite outputs cannot be compared
                return
            # A scan computes in float32 for any dtype of the model.
            tolerance, difference = max(map(tolerance_of, (whole.dtype, torch.float32))), 0.0
            for way in self._ways(inputs):
                self._continue = way
                try:
                    difference = relative_difference(self._second_half(inputs), whole)
                except (RuntimeError, ValueError, TypeError):  # the scan differs from the one that is replaced
                    continue
                if difference <= tolerance:
                    self._paged_step = self._check_paged_step(inputs, tolerance)
                    return
        raise self._refusal(
            f"gives different outputs for a sequence in two parts and for the whole (relative difference "
            f"{difference:.1e}, allowed {tolerance:.1e}), so it keeps a state that is not in transformers' cache"
        )

    def _ways(self, inputs: Inputs) -> Iterator[Callable[[Inputs, StateView], Output]]:
        """Yield ways to continue a sequence by several tokens, the best first."""
        if self._reads_its_states(inputs):
            yield self._run
        scan = ContinuedScan.of(self._module) if self._is_its_own else None
        if scan is not None:
            yield lambda inputs, view: scan(view, **self._arguments(inputs, view))
        yield self._token_by_token

    @property
    def _is_its_own(self) -> bool:
        """Whether the mixer's forward is that of its class."""
        return getattr(self._forward, "__func__", None) is type(self._module).forward

    def _check_paged_step(self, inputs: Inputs, tolerance: float) -> PagedStep | None:
        """Return the kernels' step for single tokens, if there is one and it gives the same output."""
        device = next(iter(self._layer.pages.values())).device
        step = PagedStep.of(self._module) if self._is_its_own and kernels_run_on(device) else None
        if step is None:
            return None
        befores = [
            self._first_half(half_inputs).named()
            for half_inputs in (inputs, _each(inputs, lambda tensor: tensor.flip(1)))
        ]
        index = torch.arange(4, device=device)
        # One state is written to another page, and one to its own page.
        part = StateRound(index[:2], index[1:3], index[:2] * 0, index[[3, 2]], index[:2] * 0)
        pages = {
            name: torch.stack([torch.zeros_like(first[0]), first[0], second[0], first[0]]).unsqueeze(1)
            for name, first, second in ((name, befores[0][name], befores[1][name]) for name in befores[0])
        }
        pages = {name: tensor.to(self._layer.pages[name].dtype) for name, tensor in pages.items()}
        page_copies = {name: tensor.clone() for name, tensor in pages.items()}
        tokens = _each(inputs, lambda tensor: tensor[:, :2].transpose(0, 1))
        output = _join(self._round_of(part, tokens, pages))
        try:
            step_output = _join(step(part, page_copies, self._numbers, lambda view: self._arguments(tokens, view)))
            differences = [relative_difference(step_output, output)]
            differences += [relative_difference(page_copies[name], tensor) for name, tensor in pages.items()]
        except Exception as error:  # Triton or another kind of forward may raise anything; the mixer runs without it
            _log.warning("%s is computed without kernels for its states: %s", self._name, error)
            return None
        if max(differences) > tolerance:
            _log.warning(
                "%s is computed without kernels for its states: they differ by %.1e", self._name, max(differences)
            )
            return None
        return step

    def _check_planned(self, states: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        own_states = {key: (tuple(state.shape[1:]), state.dtype) for key, state in states.items()}
        planned_states = {key: (tuple(pages.shape[2:]), pages.dtype) for key, pages in self._layer.pages.items()}
        if dtype == torch.float64:  # states that are usually float32 stay so in pages
            own_states, planned_states = (
                {key: (shape, dtype) for key, (shape, _) in states_by_key.items()}
                for states_by_key in (own_states, planned_states)
            )
        if own_states != planned_states:
            raise ModelError(
                f"layer {self._name!r} ({type(self._module).__name__}) keeps {_in_words(own_states)}, and was planned "
                f"with {_in_words(planned_states)}; its checkpoint and its config do not belong together, or a rule of "
                "the stack gives it shapes or dtypes that it does not have"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        """Compute the step's tokens, ``[1, num_tokens, hidden_size]``; the states go to their pages."""
        inputs = self._call.inputs_of(args, kwargs)
        num_tokens, step = inputs[self._call.tokens].shape[1], self._layer.step
        if not step.runs and len(step.rounds) == 1 and len(step.rounds[0].rows) == num_tokens:
            output: Output = _each_of(self._round(step.rounds[0], _each(inputs, _turned)), _turned)
            return output
        whole: Output | None = None
        for part in step.rounds:
            round_output = self._round(part, _each(inputs, _rows(part.rows)))
            whole = _empty_output(round_output, num_tokens) if whole is None else whole
            for target, new in zip(_tensors(whole), _tensors(round_output), strict=True):
                target[0].index_copy_(0, part.rows, new[:, 0])
        for run in step.runs:
            output = self._sequence(run, _each(inputs, _within(run.start, run.stop)))
            whole = _empty_output(output, num_tokens) if whole is None else whole
            for target, new in zip(_tensors(whole), _tensors(output), strict=True):
                target[:, run.start : run.stop] = new
        assert whole is not None
        return whole

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"layer {self._name!r} ({type(self._module).__name__}) {why}; only a model adapter of its own can serve it"
            f"{if_untested()}"
        )

    def _round(self, part: StateRound, inputs: Inputs) -> Output:
        if self._paged_step is None:
            return self._round_of(part, inputs, self._layer.pages)
        return self._paged_step(part, self._layer.pages, self._numbers, lambda view: self._arguments(inputs, view))

    def _round_of(self, part: StateRound, inputs: Inputs, pages: Mapping[str, torch.Tensor]) -> Output:
        view = StateView.of(part.read(pages), self._numbers)
        output = self._run(inputs, view)
        part.write(pages, view.named())
        return output

    def _sequence(self, run: StateRun, inputs: Inputs) -> Output:
        view = StateView.of(run.read(self._layer.pages), self._numbers)
        is_continued = view.has_previous_state() and run.stop - run.start > 1
        output = self._continue(inputs, view) if is_continued else self._run(inputs, view)
        run.write(self._layer.pages, view.named())
        return output

    def _arguments(self, inputs: Inputs, view: StateView) -> Inputs:
        return {**inputs, self._call.cache: view}

    def _run(self, inputs: Inputs, view: StateView) -> Output:
        output: Output = with_rows(self._forward(**self._arguments(inputs, view)), inputs[self._call.tokens], view)
        return output

    def _token_by_token(self, inputs: Inputs, view: StateView) -> Output:
        num_tokens = inputs[self._call.tokens].shape[1]
        outputs = [self._run(_each(inputs, _within(at, at + 1)), view) for at in range(num_tokens)]
        joined_outputs = tuple(torch.cat(parts, dim=1) for parts in zip(*map(_tensors, outputs), strict=True))
        return joined_outputs if isinstance(outputs[0], tuple) else joined_outputs[0]

    # --- finding out how the mixer continues a sequence ---------------------------------------------------------------

    def _first_half(self, inputs: Inputs) -> StateView:
        """Return the states after the first half of a sequence."""
        view = StateView()
        self._run(_each(inputs, _within(0, _CHECK_TOKENS // 2)), view)
        return view

    def _second_half(self, inputs: Inputs) -> torch.Tensor:
        """Return the outputs of the second half, in a separate run."""
        second_inputs = _each(inputs, _within(_CHECK_TOKENS // 2, _CHECK_TOKENS))
        return _join(self._continue(second_inputs, self._first_half(inputs)))

    def _reads_its_states(self, inputs: Inputs) -> bool:
        """Return whether the output of several tokens depends on every earlier state."""
        second_inputs = _each(inputs, _within(_CHECK_TOKENS // 2, _CHECK_TOKENS))
        for name in self._first_half(inputs).named():
            states = self._first_half(inputs).named()
            states[name] = torch.full_like(states[name], torch.nan)
            if _join(self._run(second_inputs, StateView.of(states, self._numbers))).isfinite().all():
                return False
        return True


def _rows(rows: torch.Tensor) -> Change:
    """Return the function that takes some rows of a sequence as a batch of single tokens."""
    return lambda tensor: tensor[0].index_select(0, rows).unsqueeze(1)


def _within(start: int, stop: int) -> Change:
    """Return the function that takes a part of a sequence."""
    return lambda tensor: tensor[:, start:stop]


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """Turn one sequence into a batch of single tokens, or the reverse."""
    return tensor.transpose(0, 1)


def _each(inputs: Inputs, change: Change) -> Inputs:
    """Return inputs with ``change`` applied to every tensor."""
    return {name: _each_of(value, change) for name, value in inputs.items()}


def _each_of(value: Any, change: Change) -> Any:
    if isinstance(value, tuple):
        return tuple(_each_of(item, change) for item in value)
    return change(value) if isinstance(value, torch.Tensor) else value


def _tensors(output: Output) -> Iterator[torch.Tensor]:
    return iter(output if isinstance(output, tuple) else (output,))


def _join(output: Output) -> torch.Tensor:
    """Return all tensors of an output, joined into one: ``[1, num_tokens, size]``."""
    return torch.cat([tensor.flatten(2) for tensor in _tensors(output)], dim=-1)


def _empty_output(round_output: Output, num_tokens: int) -> Output:
    """Return a step's output, still zero; the rows of padding stay so."""
    output: Output = _each_of(round_output, lambda tensor: tensor.new_zeros(1, num_tokens, *tensor.shape[2:]))
    return output


def _in_words(states: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{key} {shape} of {str(dtype).removeprefix('torch.')}" for key, (shape, dtype) in states.items())
