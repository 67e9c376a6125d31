"""Which compiled kernels a wheel holds, one for each set of instructions, and which of them this processor can run.

It imports the standard library only, because the build of a wheel runs it before anything is installed.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

SOURCES = Path(__file__).parent / "src"
LIBRARIES = Path(__file__).parent / "lib"
"""The folder of a wheel's compiled kernels; a clone has none."""

FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
CPU_FACTS = Path("/proc/cpuinfo")


class Variant(NamedTuple):
    """Kernels for one set of instructions: the compiler's flags, and what the processor must have, in Linux' names."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# The kernels ask at run time whether there is a matrix unit (AMX).
_BFLOAT16 = ("-mavx512bf16", "-mavx512vbmi", "-mamx-tile", "-mamx-bf16")
VARIANTS: Mapping[str, tuple[Variant, ...]] = MappingProxyType(
    {
        "x86_64": (
            Variant("avx512_bf16", ("-march=x86-64-v4", *_BFLOAT16), _AVX512 | {"avx512_bf16", "avx512vbmi"}),
            Variant("avx512", ("-march=x86-64-v4",), _AVX512),
            Variant("avx2", ("-march=x86-64-v3",), _AVX2),
        ),
        "aarch64": (Variant("neon", ("-march=armv8-a",), frozenset({"asimd"})),),
    }
)
"""By machine, the variants that a wheel holds, the fastest first."""


def find_library() -> Path | None:
    """Return the fastest compiled kernels of this wheel that this processor can run; None if there are none."""
    has = instructions()
    return next(
        (
            path
            for variant in VARIANTS.get(platform.machine(), ())
            if variant.needs <= has and (path := LIBRARIES / f"{variant.name}.so").exists()
        ),
        None,
    )


def instructions() -> Set[str]:
    """Return the names of this processor's sets of instructions; none if the system does not say."""
    try:
        lines = CPU_FACTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return next(
        (set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), set()
    )
