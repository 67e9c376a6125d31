"""Install the adapter in the vLLM of this process, with a stack."""

from __future__ import annotations

from kvframe import KVFrameError, Registry, Stack, load_plugins
from kvframe.contract import StackError
from kvframe_vllm.names import check_vllm

_attached: dict[str, tuple[Stack, Registry]] = {}


def attach(path: str) -> None:
    """Let vLLM's attention layers run on the backends of a stack file.

    Raises:
        KVFrameError: The stack is wrong, this vLLM cannot be served, or another stack is attached.
    """
    if path in _attached:
        return
    if _attached:
        (other,) = _attached
        raise KVFrameError(f"the stack {other} is attached to this vLLM; start another process for {path}")
    check_vllm()
    from kvframe_vllm.adapter.hooks import install

    stack = Stack.from_file(path)
    registry = load_plugins(stack.plugins).registry
    stack.check(registry)
    install(stack, registry)
    _attached[path] = stack, registry


def attached() -> tuple[Stack, Registry]:
    """Return the stack that is attached, and its registry.

    Raises:
        StackError: None is.
    """
    if not _attached:
        raise StackError(
            "KVFrameConnector keeps the pages of layers that kvframe serves; set KVFRAME_STACK to a stack file whose "
            "[cache] names page stores"
        )
    return next(iter(_attached.values()))
