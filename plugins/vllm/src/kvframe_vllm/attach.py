"""Install the adapter in the vLLM of this process, with a stack."""

from __future__ import annotations

from kvframe import KVFrameError, Stack, load_plugins
from kvframe_vllm.names import check_vllm

_attached: list[str] = []


def attach(path: str) -> None:
    """Let vLLM's attention layers run on the backends of a stack file.

    Raises:
        KVFrameError: The stack is wrong, this vLLM cannot be served, or another stack is attached.
    """
    if _attached == [path]:
        return
    if _attached:
        raise KVFrameError(f"the stack {_attached[0]} is attached to this vLLM; start another process for {path}")
    check_vllm()
    from kvframe_vllm.adapter.hooks import install

    stack = Stack.from_file(path)
    registry = load_plugins(stack.plugins).registry
    stack.check(registry)
    install(stack, registry)
    _attached.append(path)
