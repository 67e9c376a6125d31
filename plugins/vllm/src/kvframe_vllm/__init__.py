"""Run kvframe's attention types, wrappers and backends inside vLLM v1, as the stack file in ``KVFRAME_STACK`` says.

If a plugin cannot be imported, vLLM logs it and runs without it. Therefore this module imports nothing, and errors are
raised in ``register``, where they end vLLM's start.
"""


def register() -> None:
    """Attach kvframe to the vLLM of this process, if ``KVFRAME_STACK`` names a stack file.

    vLLM calls it in each of its processes, more than once in some. A further call changes nothing.

    Raises:
        KVFrameError: The stack is wrong, or this version of vLLM is not supported.
    """
    import os

    if path := os.environ.get("KVFRAME_STACK"):
        from kvframe_vllm.attach import attach

        attach(path)
