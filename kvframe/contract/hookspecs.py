"""The hooks of kvframe, in the order in which they are called.

A plugin is a small manifest module that imports nothing heavy. It is found by the entry-point group ``kvframe.v1``
and states the version of the contract that it was written for in the companion group ``kvframe.v1.api``::

    [project.entry-points."kvframe.v1"]
    my_plugin = "my_package.plugin"

    [project.entry-points."kvframe.v1.api"]
    my_plugin = "v1_0"

It may implement any of the hooks below with ``@hookimpl``, each at most once. A hook runs at set-up only, never while
tokens are computed. A hook that raises sets its own plugin aside; the other plugins still load.

The contract grows by new hooks and by new arguments, which an implementation is free not to take. Nothing is taken
away within a major version. An implementation marked ``@hookimpl(optionalhook=True)`` may have a name that this
version does not know yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pluggy

API_VERSION = "1.0"
"""The version of the contract, ``major.minor``: not the package's. A new minor adds, a new major may take away."""

hookspec = pluggy.HookspecMarker("kvframe")
hookimpl = pluggy.HookimplMarker("kvframe")
"""Marks a function of a plugin's manifest module as the implementation of the hook of the same name."""


class Register(Protocol):
    """The function that the ``kvframe_register_*`` hooks are given."""

    def __call__(
        self,
        name: str,
        target: str | type,
        *,
        needs: str | Sequence[str] | None = None,
        install: str | None = None,
        needs_versions: str | Sequence[str] | None = None,
    ) -> None:
        """Claim a name for a class. Nothing is imported until the name is used.

        May be called until the hook that was given it returns: ``register("flash_attn", "my_package.backend:FlashAttn",
        needs="flash_attn", install="pip install 'my-package[cuda]'")``.

        Args:
            name: The name that stacks and models use: ``snake_case``, once per plugin and kind.
            target: Where the class is, as ``"package.module:Class"``; a script or notebook may give the class itself.
            needs: Modules that the target imports and that may be missing (``"flash_attn"``): checked before import.
            install: What to type when something is missing (``"pip install 'my-package[cuda]'"``).
            needs_versions: The least versions of distributions (``"flash-attn>=2.8"``): checked before import too.

        Raises:
            PluginError: The name, the target or a version is not of that form, or the hook has returned.
        """


class HookSpecs:
    """Every hook, in life-cycle order."""

    @hookspec
    def kvframe_configure(self, settings: Mapping[str, Any]) -> None:
        """Take the plugin's own table of the stack file, ``[plugin.<name>]``.

        Called first, once, before anything is registered, with an empty mapping if the stack says nothing. A stack that
        has settings for a plugin without this hook is refused.

        Args:
            settings: The table as read; never changed by kvframe.

        Raises:
            Exception: Any, with a sentence that says what is wrong; the plugin is set aside as "broken".
        """

    @hookspec
    def kvframe_register_specs(self, register: Register) -> None:
        """Register cache specs: subclasses of ``KVCacheSpec`` whose ``kind`` is the registered name."""

    @hookspec
    def kvframe_register_wrappers(self, register: Register) -> None:
        """Register wrappers: subclasses of ``MetadataWrapper`` whose ``name`` is the registered name."""

    @hookspec
    def kvframe_register_backends(self, register: Register) -> None:
        """Register backends: subclasses of ``AttentionBackend``."""

    @hookspec
    def kvframe_register_formats(self, register: Register) -> None:
        """Register formats of stored keys and values: subclasses of ``KVFormat`` with that ``name``."""

    @hookspec
    def kvframe_register_eviction_policies(self, register: Register) -> None:
        """Register eviction policies: subclasses of ``EvictionPolicy`` with that ``name``."""

    @hookspec
    def kvframe_register_page_stores(self, register: Register) -> None:
        """Register page stores: subclasses of ``PageStore`` with that ``name``."""

    @hookspec
    def kvframe_register_event_publishers(self, register: Register) -> None:
        """Register publishers of cache events: subclasses of ``EventPublisher`` with that ``name``."""

    @hookspec
    def kvframe_register_scheduling_policies(self, register: Register) -> None:
        """Register scheduling policies: subclasses of ``SchedulingPolicy`` with that ``name``."""

    @hookspec
    def kvframe_register_proposers(self, register: Register) -> None:
        """Register proposers of draft tokens: subclasses of ``Proposer`` with that ``name``."""

    @hookspec
    def kvframe_register_logits_processors(self, register: Register) -> None:
        """Register logits processors: subclasses of ``LogitsProcessor`` with that ``name``."""

    @hookspec
    def kvframe_register_model_adapters(self, register: Register) -> None:
        """Register model adapters: subclasses of ``ModelAdapter``."""
