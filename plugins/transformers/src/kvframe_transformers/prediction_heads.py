"""The prediction heads of a checkpoint (multi-token prediction), as transformers builds, loads and computes them.

transformers' ``MtpModel`` has one layer for each head. It takes the token at ``p`` and a hidden state after ``p - 1``,
and it numbers positions by the token. So a head's keys lie in the cache at the position of that token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from kvframe.contract import LayerDescription, ModelDescription, ModelError, PredictionHeads
from kvframe_transformers.attached import AttachedModel
from kvframe_transformers.checkpoint import one_sentence, quiet
from kvframe_transformers.compiled import CompiledBody
from kvframe_transformers.discovery import discover_layers
from kvframe_transformers.probe import value_size
from kvframe_transformers.ranks import is_first_rank, whole_module
from kvframe_transformers.recording import PROBE_TOKENS
from kvframe_transformers.routing import RunningStep, running

LAST_HIDDEN = "last_hidden_states"
"""The name of the layer that keeps the hidden states after a request's last token."""

_EXAMINED = 1024
"""The positions up to which masks of heads are examined: those of the model's own layers were examined to their end."""

_UNEXPECTED = "_keys_to_ignore_on_load_unexpected"
"""The attribute of a model for patterns of weights that it leaves out; transformers finds the heads' weights by it."""


def num_heads_of(model: Any) -> int:
    """Return how many prediction heads a model's config declares; 0 for none."""
    return getattr(model.config.get_text_config(decoder=True), "num_mtp_layers", None) or 0


def describe_heads(model: Any, name: str) -> tuple[int, tuple[LayerDescription, ...]]:
    """Return how many prediction heads a model has, and their layers; none if they cannot be built or served.

    Args:
        model: The model on the meta device, whose layers were discovered: its implementations are those of a probe.
        name: Its name in errors.
    """
    count = num_heads_of(model)
    if not count:
        return 0, ()
    try:
        with quiet():
            with torch.device("meta"):
                heads: Any = MtpModel(model, count)
                size = heads.config.hidden_size
                inputs = {
                    "input_ids": torch.zeros(1, PROBE_TOKENS, dtype=torch.int64),
                    "last_hidden_states": torch.zeros(1, PROBE_TOKENS, size, dtype=model.dtype),
                    "attention_mask": None,
                    "position_ids": torch.zeros(1, PROBE_TOKENS, dtype=torch.int64),
                    "mtp_cache": MtpCache(config=heads.config),
                }
            heads = heads.to(model.dtype)
            layers = list(discover_layers(heads, f"the prediction heads of {name}", _EXAMINED, inputs=inputs))
    except Exception:  # a model without heads that transformers can build is served without them
        return 0, ()
    numbers = [_number_of(layer.name) for layer in layers]
    if sorted(numbers) != list(range(count)) or not all(layer.query for layer in layers):
        return 0, ()
    layers = [
        attrs.evolve(layer, query={**layer.query, "first_token": number + 1})
        for layer, number in zip(layers, numbers, strict=True)
    ]
    options = {"conv_shapes": ((count, size),), "checkpoints": "all"}
    return count, (*layers, LayerDescription(name=LAST_HIDDEN, kind="mamba", options=options, query={}))


def _number_of(layer: str) -> int:
    """Return the number of the head that a layer belongs to."""
    return int(layer.split(".")[1])


def load_heads(model: Any, description: ModelDescription) -> TransformersHeads | None:
    """Return the prediction heads of a model that was loaded, with their weights, and whole.

    Of several ranks, each calls this: the heads use the model's embedding and output matrix, and each rank has a part
    of these.

    Args:
        model: The model. Its config says where its checkpoint is.
        description: Its description.

    Returns:
        The heads; None on another rank than 0.

    Raises:
        ModelError: The checkpoint has no weights of the heads, or they cannot be loaded.
    """
    folder = model.config.name_or_path
    embedding, head = whole_module(model.get_input_embeddings()), whole_module(model.get_output_embeddings())
    if not is_first_rank():
        return None
    try:
        with quiet(), _finding_heads(model):
            heads: Any = MtpModel.from_pretrained(model, device_map={"": model.device})
    except Exception as error:  # as for the weights of a model
        raise ModelError(
            f"the prediction heads of {description.name} cannot be loaded from {folder or 'its checkpoint'}: "
            f"{one_sentence(error)}"
        ) from error
    if embedding is not model.get_input_embeddings():
        heads.embed_tokens = embedding
    if head is not model.get_output_embeddings():
        heads.shared_head = head
    layers = tuple(layer for layer in description.prediction_layers if layer.query)
    return TransformersHeads(heads.eval(), attrs.evolve(description, layers=layers))


@contextmanager
def _finding_heads(model: Any) -> Iterator[None]:
    """Let transformers find the heads' weights by the layers' numbers, whatever the model's size.

    A model's patterns name the numbers of its published checkpoints only.
    """
    first = model.config.get_text_config(decoder=True).num_hidden_layers
    numbers = "|".join(str(first + head) for head in range(num_heads_of(model)))
    own_patterns = vars(model).get(_UNEXPECTED)
    setattr(model, _UNEXPECTED, [*(getattr(model, _UNEXPECTED) or ()), rf"\.layers\.(?:{numbers})\."])
    try:
        yield
    finally:
        delattr(model, _UNEXPECTED)
        if own_patterns is not None:
            setattr(model, _UNEXPECTED, own_patterns)


class TransformersHeads(AttachedModel, PredictionHeads):
    """Runs the layers of an ``MtpModel`` one by one, through the engine's layers.

    Attributes:
        compiled_heads: The compiled heads; none if they are not compiled.
    """

    def __init__(self, model: PreTrainedModel, description: ModelDescription) -> None:
        """Take the heads in evaluation mode; arguments as for ``AttachedModel``."""
        super().__init__(model, description)
        self.compiled_heads: list[CompiledBody] = []

    def compile(self, backend: Any = "inductor") -> None:
        """Compile each head around its attention, and run a few tokens through it; arguments as for a model.

        Raises:
            ModelError: torch cannot compile them.
        """
        modules = self._modules()
        for head in range(len(self.model.layers)):
            head_layers = [layer for layer in self._attending if _number_of(layer.name) == head]
            sizes = {modules[layer.name]: value_size(layer) for layer in head_layers}
            self.compiled_heads.append(CompiledBody(partial(self._compute, head), sizes, backend))
        self._probe.check_compiled(self.compiled_heads, None)

    def detach(self) -> None:
        """Remove what an engine needs of the heads. Safe to call twice."""
        super().detach()
        for compiled_head in self.compiled_heads:
            compiled_head.remove()
        self.compiled_heads = []

    def forward_head(
        self,
        head: int,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        logits_indices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one head over one packed step; arguments and result as for ``PredictionHeads``."""
        mode = self._mode
        assert mode is not None
        with torch.inference_mode(), mode.on(), running(RunningStep(self._routes, positions)):
            states = self._run_head(head, input_ids, positions, hidden_states)
            return self.model._project_to_logits(states[logits_indices]), states

    def _run(self, input_ids: torch.Tensor, positions: torch.Tensor | None, **inputs: Any) -> torch.Tensor:
        """Run all heads, each from the states of the one before; return the logits of the last."""
        assert positions is not None
        states = self.model.embed_tokens(input_ids)
        for head in range(len(self.model.layers)):
            states = self._run_head(head, input_ids, positions, states)
        logits: torch.Tensor = self.model._project_to_logits(states)
        return logits

    def _run_head(
        self, head: int, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        compute = self.compiled_heads[head] if self.compiled_heads else partial(self._compute, head)
        states: torch.Tensor = compute(input_ids=input_ids, positions=positions, hidden_states=hidden_states)
        return states

    def _compute(
        self, head: int, *, input_ids: torch.Tensor, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        states: torch.Tensor = self.model.forward_layer(
            head, hidden_states.unsqueeze(0), positions.unsqueeze(0), None, input_ids=input_ids.unsqueeze(0)
        )
        return states[0]
