"""What a part must leave as it is for the rest of the process, and a decorator for checks that find a change."""

from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from kvframe_testing.laws import ConformanceError

P = ParamSpec("P")
T = TypeVar("T")


_STATE: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's random generator": (
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
    "Python's random generator": (random.getstate, random.setstate),
    "NumPy's random generator": (
        lambda: pickle.dumps(np.random.get_state()),
        lambda state: np.random.set_state(pickle.loads(state)),
    ),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "whether torch records gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
}
"""What a process has one of, by name: how it is read, and set again."""


def without_side_effects(check: Callable[P, T]) -> Callable[P, T]:
    """Return a check that also fails if what it runs leaves any of ``_STATE`` changed; it is then set again."""

    @functools.wraps(check)
    def checked(*arguments: P.args, **options: P.kwargs) -> T:
        values_before = {name: read() for name, (read, _) in _STATE.items()}
        failure: Exception | None = None
        try:
            result = check(*arguments, **options)
        except Exception as error:
            failure = error
        changed_names = [name for name, (read, _) in _STATE.items() if values_before[name] != read()]
        for name in changed_names:
            _STATE[name][1](values_before[name])
        if changed_names:
            raise ConformanceError(
                f"it changes {', '.join(changed_names)}, which the rest of the process uses too: set it again, or use "
                "an object of its own"
            ) from failure
        if failure is not None:
            raise failure
        return result

    return checked
