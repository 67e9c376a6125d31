"""The text part of models that also take pictures or sound: their other parts are not loaded if text needs none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, SiglipVisionConfig
from transformers.utils import is_timm_available

from kvframe.contract import ModelError
from kvframe_transformers.recording import record

_Body: Any = AutoModel  # it has no type hints


def idle_parts(model: Any, name: str) -> tuple[str, ...]:
    """Return the paths of the parts that a forward of text does not run, such as a vision tower and its projector.

    They are children of modules that contain the text decoder, and no module of theirs runs.

    Args:
        model: A ``PreTrainedModel`` on the meta device for this call only: its implementations are changed.
        name: The model's name in errors.

    Raises:
        ModelError: The forward fails.
    """
    if not model.config.sub_configs or model.config.is_encoder_decoder:
        return ()
    paths = {module: path for path, module in model.named_modules()}
    decoder = paths.get(model.get_decoder())
    if not decoder:
        return ()
    needed_modules = set(record(model, name).ran) | {model.get_input_embeddings(), model.get_output_embeddings()}
    return tuple(
        path
        for path, module in _beside(model, decoder)
        if any(True for _ in module.parameters()) and needed_modules.isdisjoint(module.modules())
    )


def _beside(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children, which are not on the way to ``path``, of every module that is."""
    module, before = model, ""
    for step in path.split("."):
        for name, child in module.named_children():
            if name != step:
                yield before + name, child
        module, before = getattr(module, step), f"{before}{step}."


def without_timm(config: Any) -> None:
    """Replace configs of parts that need the library timm, if it is not installed, by others with the same attributes.

    Without it transformers cannot build the model, though text needs none of these parts and they are not loaded.
    """
    if is_timm_available():
        return
    for name in config.sub_configs:
        part = getattr(config, name, None)
        made_by = _Body._model_mapping.get(type(part), None)
        if getattr(made_by, "__name__", None) == "TimmWrapperModel":
            stand_in = SiglipVisionConfig(num_attention_heads=1, num_hidden_layers=1, image_size=16, patch_size=16)
            vars(stand_in).update({key: value for key, value in vars(part).items() if not key.startswith("_")})
            vars(config)[name] = stand_in  # the config would refuse another class


class Absent(nn.Module):
    """Stands in a model for a part that was not loaded; text does not run it, but may read its device and dtype."""

    _nothing: torch.Tensor

    def __init__(self, path: str) -> None:
        """Keep the path of the part for errors."""
        super().__init__()
        self._path = path
        # It moves with the model.
        self.register_buffer("_nothing", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self._nothing.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self._nothing.dtype

    def forward(self, *_: Any, **__: Any) -> None:
        """Raise ``ModelError``: there are no weights."""
        raise ModelError(f"the part {self._path!r} was not loaded, because text does not need it")


def remove_parts(model: nn.Module, paths: Sequence[str]) -> None:
    """Replace parts of a model, so that it has no weights of them."""
    for path in paths:
        model.set_submodule(path, Absent(path))


def class_without(model_class: Any, paths: Sequence[str]) -> Any:
    """Return a class like ``model_class`` whose models do not have some parts.

    transformers does not read weights of parts that a model does not have.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        remove_parts(self, paths)

    # transformers finds the names of a checkpoint's weights by the name of the class.
    return type(model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__})
