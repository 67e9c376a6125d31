"""Choose the adapter for the installed vLLM and install it with a stack."""

from __future__ import annotations

import importlib

import vllm

from kvframe import KVFrameError, Stack, load_plugins
from kvframe_vllm.names import missing_names

ADAPTERS = {"0.32": "kvframe_vllm.v0_32.hooks"}
"""The adapter's module for each minor version of vLLM."""
_attached: list[str] = []


def attach(path: str) -> None:
    """Let vLLM's attention layers run on the backends of a stack file.

    Raises:
        KVFrameError: The stack is wrong, there is no adapter for this vLLM, or another stack is attached.
    """
    if _attached == [path]:
        return
    if _attached:
        raise KVFrameError(f"the stack {_attached[0]} is attached to this vLLM; start another process for {path}")
    minor = ".".join(vllm.__version__.split(".")[:2])
    if minor not in ADAPTERS:
        raise KVFrameError(
            f"kvframe-vllm has no adapter for vLLM {vllm.__version__}; it has one for {', '.join(ADAPTERS)}: install "
            "that version, or unset KVFRAME_STACK to run without kvframe"
        )
    if missing := missing_names():
        raise KVFrameError(f"vLLM {vllm.__version__} lacks names that kvframe-vllm uses: {', '.join(missing)}")
    stack = Stack.from_file(path)
    registry = load_plugins(stack.plugins).registry
    stack.check(registry)
    importlib.import_module(ADAPTERS[minor]).install(stack, registry)
    _attached.append(path)
