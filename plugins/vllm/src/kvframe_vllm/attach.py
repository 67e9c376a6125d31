"""Which adapter serves the installed vLLM, with which stack."""

from __future__ import annotations

import importlib

import attrs
import vllm

from kvframe import KVFrameError, Registry, Stack, load_plugins
from kvframe_vllm.names import missing_names

ADAPTERS = {"0.32": "kvframe_vllm.v0_32.hooks"}
"""The adapter's module for each minor version of vLLM."""


@attrs.frozen
class Choices:
    """What an operator chose for this process.

    Attributes:
        stack: The stack file.
        registry: The names that its plugins registered.
    """

    stack: Stack
    registry: Registry


_attached: dict[str, Choices] = {}


def attach(path: str) -> None:
    """Read a stack file, and let vLLM's attention layers run on what it chooses.

    Args:
        path: The stack file.

    Raises:
        KVFrameError: The stack is wrong, there is no adapter for this vLLM, or another stack is attached.
    """
    if path in _attached:
        return
    if _attached:
        raise KVFrameError(
            f"the stack {next(iter(_attached))} is attached to this vLLM; start another process for {path}"
        )
    minor = ".".join(vllm.__version__.split(".")[:2])
    if minor not in ADAPTERS:
        raise KVFrameError(
            f"kvframe-vllm has no adapter for vLLM {vllm.__version__}; it has one for {', '.join(ADAPTERS)}: install "
            "that version, or unset KVFRAME_STACK to run without kvframe"
        )
    if missing := missing_names():
        raise KVFrameError(f"vLLM {vllm.__version__} lacks what kvframe-vllm uses of it: {', '.join(missing)}")
    stack = Stack.from_file(path)
    choices = Choices(stack, load_plugins(stack.plugins).registry)
    stack.check(choices.registry)
    importlib.import_module(ADAPTERS[minor]).install(choices)
    _attached[path] = choices
