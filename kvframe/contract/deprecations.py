"""What plugins should no longer use, and what to write instead. A deprecated use works until the next major version.

A minor version adds a line to ``DEPRECATED``; ``docs/contract_version.md`` says how long it stays there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs


@attrs.frozen(kw_only=True)
class Deprecation:
    """One thing that is on its way out.

    Attributes:
        since: The version of the contract that deprecated it (``"1.1"``).
        instead: What to write instead: a verb and what follows (``"implement kvframe_register_kernels"``).
    """

    since: str
    instead: str


DEPRECATED: Mapping[str, Deprecation] = MappingProxyType({})
"""By name: a hook (``"kvframe_configure"``), a method or class attribute (``"AttentionBackend.bind"``), or one argument
of a hook, of a method or of ``register`` (``"AttentionBackend.forward(sinks)"``, ``"register(needs)"``)."""
