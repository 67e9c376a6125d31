"""Whether the device that a stack names can be used."""

from __future__ import annotations

import torch

from kvframe.config.stack import Stack
from kvframe.contract.errors import StackError


def check_device(stack: Stack) -> None:
    """Refuse a device that cannot be used, before a model is loaded.

    Raises:
        StackError: The stack names such a device.
    """
    try:
        torch.empty(0, device=stack.engine.device)
    except (RuntimeError, AssertionError) as error:  # a build of torch without the device asserts
        reason = str(error).strip().splitlines()[0]
        raise StackError(f"{stack.source}: engine.device {stack.engine.device!r} cannot be used: {reason}") from error
