"""Compiles and loads the C code that plans steps: the arrays are so small that calling NumPy takes most of its time.

Like Triton's own launchers, it is built by the compiler that Triton needs, into Triton's cache folder.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).parent / "src"


def source() -> str:
    """Return the C code as one file."""
    return "\n".join((SOURCES / name).read_text(encoding="utf-8") for name in ("tiles.h", "parts.h", "plan.c"))


@cache
def load() -> ModuleType | None:
    """Return the compiled module; None if it cannot be built, which is reported once in one line on stderr."""
    try:
        # A version of Triton may have it elsewhere, or Triton may be missing.
        from triton.runtime.build import compile_module_from_src

        module: ModuleType = compile_module_from_src(source(), "kvframe_kernels_plan")
    except (RuntimeError, ImportError, OSError, subprocess.CalledProcessError) as error:
        print(f"kvframe-kernels: steps are planned by NumPy, which takes longer: {error}", file=sys.stderr, flush=True)
        return None
    return module
