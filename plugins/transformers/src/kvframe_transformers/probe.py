"""Runs a few tokens through a model whose layers only record their calls, to find what each module does in a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn

from kvframe.contract import LayerDescription, ModelDescription, ModelError
from kvframe_transformers.apart import LENGTHS, find_apart
from kvframe_transformers.checkpoint import one_sentence
from kvframe_transformers.compiled import CompiledBody, for_any_size
from kvframe_transformers.mixers import MixerDriver
from kvframe_transformers.names import if_untested
from kvframe_transformers.routing import Route, RunningStep, routes_by_module, running
from kvframe_transformers.self_check import ordinary_ids, tolerance_of
from kvframe_transformers.shared_inputs import SharedInputs
from kvframe_transformers.skipping import RowCutter
from kvframe_transformers.states import Forward
from kvframe_transformers.step_mode import StepMode


def value_size(layer: LayerDescription) -> int:
    """Return the size of the heads of a layer's output."""
    size: int = layer.options.get("head_size_v") or layer.options["head_size"]
    return size


class _RecordingLayer:
    """Records how many queries it gets, and gives zeros."""

    def __init__(self, layer: LayerDescription, num_rows: dict[str, int]) -> None:
        self._layer, self._num_rows = layer, num_rows

    def bind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take no parameters."""

    def __call__(self, query: torch.Tensor, *_: Any, lse: torch.Tensor | None = None, **__: Any) -> torch.Tensor:
        self._num_rows[self._layer.name] = len(query)
        if lse is not None:
            lse.zero_()
        return query.new_zeros(*query.shape[:2], value_size(self._layer))


@attrs.frozen(kw_only=True, eq=False)
class Probe:
    """A model that is being attached, and the ways to find out how it computes.

    Attributes:
        description: The model's description.
        model: The model.
        modules: The modules of the described layers, by layer name.
        mode: What switches the model to the engine's layers.
        drivers: The mixers that keep a state, by module.
        run: Runs ``input_ids`` and ``positions`` through the model, and returns logits or hidden states.
        takes_rows: Whether ``run`` takes ``logits_to_keep``, the rows whose logits are wanted.
    """

    description: ModelDescription
    model: Any
    modules: Mapping[str, nn.Module]
    mode: StepMode
    drivers: Mapping[nn.Module, MixerDriver]
    run: Callable[..., torch.Tensor]
    takes_rows: bool

    def count_rows(
        self, num_tokens: int, kept_rows: torch.Tensor | None, num_wanted: int | None = None
    ) -> tuple[dict[str, int], torch.Tensor]:
        """Run tokens through layers that only record how many queries they get.

        Args:
            num_tokens: Tokens of the step.
            kept_rows: The rows that the last layers compute; None if they compute all.
            num_wanted: The number of rows whose logits are wanted; None for the model's default.

        Returns:
            The number of queries of each layer that was called, and the logits.
        """
        num_rows: dict[str, int] = {}
        attending = [layer for layer in self.description.layers if layer.query]
        routes = routes_by_module(
            {layer.name: Route.of(layer, _RecordingLayer(layer, num_rows)) for layer in attending}, self.modules
        )
        forwards = {module: partial(driver.note, num_rows) for module, driver in self.drivers.items()}
        inputs = {}
        with torch.inference_mode():
            positions = torch.arange(num_tokens, device=self.model.device)
            if num_wanted is not None and self.takes_rows:
                inputs["logits_to_keep"] = torch.arange(num_wanted, device=self.model.device)
            with (
                self.mode.on(forwards),
                running(RunningStep(routes, positions, kept_rows, self.mode.by_content)),
            ):
                return num_rows, self.run(torch.zeros_like(positions), positions, **inputs)

    def check_calls(self, linears: Iterable[nn.Linear] = ()) -> list[tuple[nn.Linear, ...]]:
        """Check that every described layer is called in a step, and find how mixers continue a sequence.

        Args:
            linears: Linear layers whose inputs are compared.

        Returns:
            The linear layers that get the same input, by input.

        Raises:
            ModelError: A layer is missing, or is not called through transformers' attention interface.
        """
        name = self.description.name
        layer_names = [layer.name for layer in self.description.layers if layer.entry_of is None]
        for layer_name in layer_names:
            if layer_name not in self.modules:
                raise ModelError(f"{name} has no module {layer_name!r}, which its config describes")
        inputs = SharedInputs()
        with inputs.recorded(linears):
            num_rows, _ = self.count_rows(2, None)
        for layer_name in layer_names:
            if layer_name not in num_rows:
                raise ModelError(
                    f"layer {layer_name!r} of {name} ({type(self.modules[layer_name]).__name__}) does not "
                    f"run through transformers' attention interface, so kvframe cannot serve it{if_untested()}"
                )
        for driver in self.drivers.values():
            driver.check()
        return inputs.groups()

    def check_rows_left_out(self, skipped_names: Sequence[str], refusal: str) -> None:
        """Check in a step of three tokens that keeps one that the skipped layers leave out the others.

        Args:
            skipped_names: The attention layers that compute only the rows that are kept.
            refusal: The start of the error's sentence.

        Raises:
            ModelError: A layer computes other rows, or the model fails.
        """
        kept_rows = torch.tensor([1], device=self.model.device)
        try:
            num_rows, logits = self.count_rows(3, kept_rows)
        except (RuntimeError, IndexError, ValueError) as error:  # the model's error for rows that do not fit
            raise ModelError(f"{refusal} ({one_sentence(error)}); turn prefill skipping off for it") from error
        wrong_names = [name for name, rows in num_rows.items() if rows != (1 if name in skipped_names else 3)]
        if wrong_names or len(logits) != 1:
            name = next(iter(wrong_names), None)
            finding = f"it gave {len(logits)} logits" if name is None else f"layer {name!r} got {num_rows[name]} rows"
            raise ModelError(
                f"{refusal} ({finding} in a step of three tokens that keeps one); turn prefill skipping off for it"
            )

    def check_compiled(self, parts: Sequence[CompiledBody], cutter: RowCutter | None) -> None:
        """Run a few tokens through the compiled parts of the model.

        Args:
            parts: Every run calls each of them once.
            cutter: What leaves rows out of the last layers; None if they compute all.

        Raises:
            ModelError: torch cannot compile them.
        """
        try:
            # Called as in a step: with other arguments, the first step would compile the model again.
            with for_any_size():
                self.count_rows(3, None, num_wanted=2)
                for part in parts:
                    part.note_probe()
                if cutter is not None:
                    self.count_rows(5, torch.tensor([1, 3], device=self.model.device))
                    for part in parts:
                        part.note_probe()
            # Some models, and some compilers, need code of its own for a single token.
            self.count_rows(1, None, num_wanted=1)
        except Exception as error:  # a compiler may raise anything
            raise ModelError(
                f"{self.description.name} cannot be compiled here ({one_sentence(error)}); leave compile out",
                code="not_compiled",
            ) from error

    def find_apart(self, body: Any, attending: Collection[nn.Module]) -> dict[nn.Module, Forward]:
        """Return the forwards in a step of modules that mix the tokens of a batch.

        Args:
            body: The part of the model that runs.
            attending: The modules of its attention layers.
        """
        if self.description.max_model_len < max(LENGTHS):
            return {}
        ids = ordinary_ids(self.model.config.to_dict(), self.description.vocab_size or 1)
        generator = torch.Generator().manual_seed(0)

        def run_random(length: int) -> None:
            tokens = ids[torch.randint(len(ids), (length,), generator=generator)].to(self.model.device)
            self.run(tokens, torch.arange(length, device=self.model.device))

        with torch.inference_mode(), self.mode.off():
            return find_apart(body, attending, run_random, tolerance_of(self.model.dtype))
