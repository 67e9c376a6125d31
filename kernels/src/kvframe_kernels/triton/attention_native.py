"""The cutting of steps in C, for NumPy's calls on arrays this small cost more than what they compute.

It is built as Triton builds what launches its kernels: by the compiler that it needs for that, into its cache folder.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).parent / "src"


@cache
def load() -> ModuleType | None:
    """Return the compiled module; None where it cannot be built, which is said in one line, once."""
    source = "\n".join((SOURCES / name).read_text(encoding="utf-8") for name in ("tiles.h", "parts.h", "cut.c"))
    try:
        # Triton does not promise to have it at this place in every version, or to be there at all.
        from triton.runtime.build import compile_module_from_src

        module: ModuleType = compile_module_from_src(source, "kvframe_kernels_cut")
    except (RuntimeError, ImportError, OSError, subprocess.CalledProcessError) as error:
        print(f"kvframe-kernels: steps are cut by NumPy, which takes longer: {error}", file=sys.stderr, flush=True)
        return None
    return module
