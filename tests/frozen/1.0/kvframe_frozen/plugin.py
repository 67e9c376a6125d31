"""The manifest of the frozen plugin."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_specs(register: Register) -> None:
    """Register the name."""
    register("frozen_spec", "kvframe_frozen.spec:FrozenSpec")


@hookimpl
def kvframe_register_wrappers(register: Register) -> None:
    """Register the name."""
    register("frozen_wrapper", "kvframe_frozen.wrapper:FrozenWrapper")


@hookimpl
def kvframe_register_backends(register: Register) -> None:
    """Register the name."""
    register("frozen_backend", "kvframe_frozen.backend:FrozenBackend")


@hookimpl
def kvframe_register_formats(register: Register) -> None:
    """Register the name."""
    register("frozen_format", "kvframe_frozen.format:FrozenFormat")


@hookimpl
def kvframe_register_eviction_policies(register: Register) -> None:
    """Register the name."""
    register("frozen_eviction", "kvframe_frozen.policy:FrozenEviction")


@hookimpl
def kvframe_register_proposers(register: Register) -> None:
    """Register the name."""
    register("frozen_proposer", "kvframe_frozen.proposer:FrozenProposer")


@hookimpl
def kvframe_register_model_adapters(register: Register) -> None:
    """Register the name."""
    register("frozen_adapter", "kvframe_frozen.adapter:FrozenAdapter")
