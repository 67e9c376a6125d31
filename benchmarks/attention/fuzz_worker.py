"""Runs a backend on drawn cases, with each access of its kernels checked: a process of ``benchmarks.attention.fuzz``.

    python -m benchmarks.attention.fuzz_worker KERNELS FIRST COUNT [LIBRARY]

prints a line of JSON before each case, one after it, and a last one. A sanitizer ends the process within a case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import installed_formats
from kvframe_testing.laws import ConformanceError

from kvframe.contract import AttentionBackend
from kvframe.loading.plugins import load_plugins
from tests.attention import checked_kernels
from tests.attention.drawn_cases import SMALL, USUAL, WrongHost, draw_case, traits_of, usual_case
from tests.interpreter import make_faster

BACKENDS = {"cpu": "cpu", "numba": "numba", "triton": "triton", "triton_mla": "triton_mla"}
"""The backend that runs each kind of kernels."""


def main(kernels: str, first: int, count: int, library: Path | None = None) -> None:
    """Run ``count`` cases from the seed ``first`` on, and then one that reads a page that is not there."""
    registry = load_plugins().registry
    backend_class: type[AttentionBackend] = registry.backends.load(BACKENDS[kernels])
    checked: Callable[[], AbstractContextManager[Any]] = nullcontext
    sizes = USUAL
    if kernels.startswith("triton"):
        from triton.runtime import interpreter

        make_faster(interpreter)
        # Arithmetic in bfloat16 is wrong in the interpreter, which runs on the CPU.
        able = backend_class.capabilities
        backend_class.capabilities = attrs.evolve(able, devices={"cpu"}, dtypes=able.dtypes - {"bfloat16"})
        checked, sizes = checked_kernels.triton_addresses_checked, SMALL
        if library is not None:
            checked_kernels.use_plan(library)
    elif kernels == "numba":
        checked = checked_kernels.numba_errors_raised
    elif library is not None:
        checked_kernels.use_library(library)
    chain = (registry.wrappers.load("decode_only")(),)
    draw = partial(draw_case, backend_class=backend_class, formats=installed_formats(), chain=chain, sizes=sizes)
    for seed in range(first, first + count):
        case, host = draw(seed)
        say(seed=seed, traits=traits_of(case, host))
        torch.set_num_threads(1 + seed % 3)
        problem = None
        try:
            with checked():
                # A large finite value finds what hides NaN.
                check_backend(backend_class, case, host=host, poison=float("nan") if seed % 2 else 1e4)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        say(done=seed, problem=problem)
    say(planted=True)
    try:
        with checked():
            check_backend(backend_class, usual_case(backend_class), host=WrongHost())
    except ConformanceError:
        say(missed=True)
    except MemoryError as error:
        say(caught=str(error))


def say(**values: object) -> None:
    """Print a line for the other process."""
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *map(Path, sys.argv[4:]))
