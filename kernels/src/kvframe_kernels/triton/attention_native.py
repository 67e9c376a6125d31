"""Compiles and loads the C code that plans steps: the arrays are so small that calling NumPy takes most of its time.

Like Triton's own launchers, it is built by the compiler that Triton needs, into Triton's cache folder.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).parent / "src"


def source() -> str:
    """Return the C code as one file."""
    return "\n".join((SOURCES / name).read_text(encoding="utf-8") for name in ("tiles.h", "parts.h", "plan.c"))


@cache
def load() -> ModuleType:
    """Return the compiled module.

    Raises:
        RuntimeError: It cannot be built. Triton cannot build its launchers then either.
    """
    try:
        from triton.runtime.build import compile_module_from_src

        module: ModuleType = compile_module_from_src(source(), "kvframe_kernels_plan")
    except (RuntimeError, ImportError, OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(
            f"the C code that plans Triton's steps cannot be built: {error}; install a C compiler and the headers of "
            "Python, which Triton needs too"
        ) from error
    return module
