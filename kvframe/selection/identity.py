"""Identity: tells whether two uses of a plugin's class are the same thing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvframe.contract.errors import PluginError


def freeze(value: Any) -> Any:
    """Return ``value`` with its lists, sets and mappings made hashable; equal values give equal results."""
    if isinstance(value, Mapping):
        return tuple(sorted(((key, freeze(item)) for key, item in value.items()), key=repr))
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted((freeze(item) for item in value), key=repr))
    return value


@attrs.frozen
class Identity:
    """The identity of a plugin's class, in any process: a value that can be hashed, compared and pickled.

    Two plugins may each have a class ``MyBackend``; they have different identities. One class with equal parameters
    has one identity, in every process.

    Attributes:
        distribution: The distribution that provides it (``"kvframe-triton"``).
        qualified_name: Its module, and its name in the module (``"kvframe_triton.backend:TritonBackend"``).
        parameters: Its parameters by name, frozen and sorted.
    """

    distribution: str
    qualified_name: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, distribution: str, used_class: type, parameters: Mapping[str, Any] | None = None) -> Identity:
        """Return the identity of a class of ``distribution`` with ``parameters``.

        Raises:
            PluginError: A parameter cannot be hashed.
        """
        qualified_name, frozen = f"{used_class.__module__}:{used_class.__qualname__}", freeze(parameters or {})
        for name, value in frozen:
            try:
                hash(value)
            except TypeError as error:
                raise PluginError(
                    f"{qualified_name} of {distribution} holds {value!r} as its {name!r}, and parameters are frozen "
                    f"values ({error})"
                ) from error
        return cls(distribution, qualified_name, frozen)

    def __str__(self) -> str:
        parameters = ", ".join(f"{name}={value!r}" for name, value in self.parameters)
        return f"{self.distribution} {self.qualified_name}({parameters})"
