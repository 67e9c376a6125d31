"""List the backends of kvframe that run on a device."""

from __future__ import annotations

from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import KVFrameError
from kvframe.loading.registry import Registry

ORACLE = "torch_reference"
"""The reference backend; it is slow on purpose and never measured."""


def usable_backends(registry: Registry, device: str) -> tuple[dict[str, type[AttentionBackend]], dict[str, str]]:
    """Return the backends that run on a device by name, and for each other backend the reason why it does not."""
    found, missing = {}, {}
    for name in registry.backends.names():
        if name == ORACLE:
            continue
        try:
            backend_class = registry.backends.load(name)
            if device in backend_class.capabilities.devices:
                reason = backend_class.unusable_reason()
            else:
                reason = f"does not run on {device}"
        except KVFrameError as error:
            reason = str(error)
        if reason:
            missing[name] = reason
        else:
            found[name] = backend_class
    return found, missing
