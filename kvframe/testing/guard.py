"""Stand-ins for a device's tensors on any machine: waiting for the device or writing to them raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.testing.laws import ConformanceError

_WAITING = frozenset(
    {
        *("item", "tolist", "numpy", "cpu", "__array__", "__contains__"),
        *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
        *("equal", "allclose", "is_nonzero", "nonzero", "argwhere", "masked_select"),
        *("unique", "unique_consecutive", "bincount", "tensor_split"),
    }
)
"""Functions for whose result, or its shape, the host has to wait."""


class DeviceTensor(torch.Tensor):
    """A tensor whose values the host must not read; results of its operations are guarded too."""

    is_cpu = False

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, unless it waits. Results are guarded, and views of a read-only tensor are read-only."""
        kwargs = kwargs or {}
        if _waits(func.__name__, args, kwargs):
            raise ConformanceError(f"{func.__name__} makes the host wait for the device")
        read_only = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, ReadOnlyTensor)]
        with torch._C.DisableTorchFunctionSubclass():
            # A write through any view increases the one version number of the memory.
            versions = [tensor._version for tensor in read_only]
            result = func(*args, **kwargs)
            if versions != [tensor._version for tensor in read_only]:
                raise ConformanceError(f"{func.__name__} writes to a tensor that others read too")
            memory = {tensor.untyped_storage().data_ptr() for tensor in read_only}

            def as_guarded(tensor: torch.Tensor) -> torch.Tensor:
                shows = tensor.untyped_storage().data_ptr() in memory
                return tensor.as_subclass(ReadOnlyTensor if shows else DeviceTensor)

            return tree_map_only(torch.Tensor, as_guarded, result)


class ReadOnlyTensor(DeviceTensor):
    """A device tensor that must not be written to, not even through a view."""


class ScalarGuard(TorchDispatchMode):
    """A torch mode that catches reads of device tensors inside torch, as in ``torch.arange(tensor)``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``, unless it reads a device tensor as a number."""
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], DeviceTensor):
            raise ConformanceError("a device tensor is read as a number, for which the host waits")
        return func(*args, **(kwargs or {}))


def guard(metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Return the metadata with its device tensors guarded and read-only; host tensors are unchanged."""
    return with_device_tensors(metadata, lambda tensor: tensor.as_subclass(ReadOnlyTensor))


def unguard(metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Return the metadata with plain tensors."""
    return with_device_tensors(metadata, lambda tensor: tensor.as_subclass(torch.Tensor))


def with_device_tensors(
    metadata: CommonAttentionMetadata, change: Callable[[torch.Tensor], torch.Tensor]
) -> CommonAttentionMetadata:
    """Return the metadata with ``change`` of each device tensor; host tensors are unchanged."""
    with torch._C.DisableTorchFunctionSubclass():
        changes: dict[str, Any] = {
            field.name: change(value)
            for field in attrs.fields(CommonAttentionMetadata)
            if isinstance(value := getattr(metadata, field.name), torch.Tensor) and not field.name.endswith("_cpu")
        }
        changes["extensions"] = {
            name: attrs.evolve(extension, values=change(extension.values))
            for name, extension in metadata.extensions.items()
        }
    return attrs.evolve(metadata, **changes)


def _waits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call makes the host wait for the device."""
    if name == "to":
        # Only a move to the device named "cpu" counts: these tensors are on the host themselves.
        return "cpu" in [item for item in (*args[1:], *kwargs.values()) if isinstance(item, str)]
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(_index_waits(item) for item in index)
    return name in _WAITING


def _index_waits(item: Any) -> bool:
    """Return whether the host must know values of an index: a mask, a number, or the end of a slice."""
    if isinstance(item, slice):
        return any(isinstance(end, DeviceTensor) for end in (item.start, item.stop, item.step))
    return isinstance(item, DeviceTensor) and (item.dtype in (torch.bool, torch.uint8) or item.ndim == 0)
