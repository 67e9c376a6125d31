"""Encoders whose attention no layer describes: the model's own code computes each text of a step alone."""

from __future__ import annotations

from typing import Any

import torch

from kvframe.contract import AttachedLayers, ModelError
from kvframe_transformers.encoders import choose_attention_anew
from kvframe_transformers.model import TransformersModel
from kvframe_transformers.self_check import RunPacked


class EncoderAlone(TransformersModel):
    """Runs an encoder by its own forward, one text of a step after the other.

    An encoder keeps nothing between steps, so nothing of it needs a cache or a backend (DeBERTa, arXiv 2006.03654;
    Longformer, arXiv 2004.05150; BigBird, arXiv 2007.14062; FNet, arXiv 2105.03824).
    """

    def attach(self, layers: AttachedLayers) -> None:
        """Begin to serve; there are no layers."""
        self.claim()
        self._layers = layers

    def weights_changed(self) -> None:
        """Do nothing: no tensors are made of the weights."""

    def compile(self, backend: Any = "inductor") -> None:
        """Raise ``ModelError``: it is called with texts of any length."""
        raise ModelError(f"{self.description.name} computes each text alone, so it is not compiled; leave compile out")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """Run the texts of one step; arguments and result as for ``TransformersModel``."""
        if self._layers is None:
            raise ModelError(f"{self.description.name} is not attached to an engine; make an engine for it")
        starts = (positions == 0).nonzero().flatten().tolist()
        is_training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                ends = [*starts[1:], len(input_ids)]
                rows = [self._states_of(input_ids[start:stop]) for start, stop in zip(starts, ends, strict=True)]
                return torch.cat(rows)[logits_indices]
        finally:
            self.model.train(is_training)

    def _states_of(self, text: torch.Tensor) -> torch.Tensor:
        choose_attention_anew(self._body)
        states: torch.Tensor = self._body(input_ids=text[None]).last_hidden_state[0]
        return states

    def self_check(self, run_packed: RunPacked) -> None:
        """Check that each text has a row for each token.

        Raises:
            ModelError: It has not.
        """
        lengths = (5, 9)
        num_rows = [len(rows) for rows in run_packed([[1] * length for length in lengths])]
        if [*lengths] != num_rows:
            raise ModelError(f"{self.description.name} gives {num_rows} hidden states of texts of {[*lengths]} tokens")
