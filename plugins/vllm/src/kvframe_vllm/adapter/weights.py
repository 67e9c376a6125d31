"""Digests of the models that this process loads, taken before vLLM changes their weights for its kernels."""

from __future__ import annotations

from typing import Any

import torch
from kvframe_stores import digest_weights
from vllm.model_executor.model_loader import base_loader

from kvframe.contract import BackendError

_digests: list[str] = []


def note_weights() -> None:
    """Let vLLM's loaders digest each model that they load. On a CPU, its layers do not keep the weights themselves."""
    process = base_loader.process_weights_after_loading

    def digest(model: Any, *args: Any, **options: Any) -> Any:
        weights = {name: weight for name, weight in model.state_dict().items() if isinstance(weight, torch.Tensor)}
        _digests.append(digest_weights(weights))
        return process(model, *args, **options)

    base_loader.process_weights_after_loading = digest


def digests_of_weights() -> list[str]:
    """Return the digest of each model that was loaded.

    Raises:
        BackendError: The model was loaded by a loader of another kind.
    """
    if not _digests:
        raise BackendError(
            "KVFrameConnector names pages by a digest of the weights, and vLLM loaded them by a loader that gives "
            "none; start it with --load-format auto"
        )
    return [*_digests]
