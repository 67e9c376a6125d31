"""Find the backends of a device, and give one a layer and its pages, without an engine."""

from __future__ import annotations

from typing import Any

import torch

from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import KVFrameError
from kvframe.contract.specs import STATE_ALIGNMENT_BYTES, KVCacheSpec, LayerSpec, align_up
from kvframe.loading.registry import Registry


def usable_backends(registry: Registry, device: str) -> tuple[dict[str, type[AttentionBackend]], dict[str, str]]:
    """Return the backends that run on a device by name, and for each other backend the reason why it does not."""
    backends, missing = {}, {}
    for name in registry.backends.names():
        if name == "torch_reference":
            continue  # It is slow on purpose.
        try:
            backend_class = registry.backends.load(name)
            is_served = device in backend_class.capabilities.devices
            reason = backend_class.unusable_reason() if is_served else f"does not run on {device}"
        except KVFrameError as error:
            reason = str(error)
        if reason:
            missing[name] = reason
        else:
            backends[name] = backend_class
    return backends, missing


def page_views(spec: KVCacheSpec, pool: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a layer's state tensors by name, each ``[num_pages, …]``, over ``[num_pages * block_bytes], uint8``."""
    pages = pool.view(-1, spec.block_bytes)
    views, start = {}, 0
    for name, tensor in spec.state_tensors().items():
        part = pages[:, start : start + tensor.num_bytes].view(getattr(torch, tensor.dtype))
        views[name] = part.unflatten(1, tensor.shape)
        start += align_up(tensor.num_bytes, STATE_ALIGNMENT_BYTES)
    return views


def make_backend(backend_class: type[AttentionBackend], layer: LayerSpec, device: torch.device) -> AttentionBackend:
    """Return a backend for one layer, with its default options."""
    options = backend_class.options_class
    make: Any = backend_class
    backend: AttentionBackend = make([layer], device) if options is None else make([layer], device, options())
    return backend
