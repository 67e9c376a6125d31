"""Compile the CPU kernels into the wheel if KVFRAME_KERNELS_PREBUILT is set, with the compiler that CXX names.

Such a wheel is for one kind of machine and for every version of Python. Without the variable the wheel is for every
machine, and the kernels are compiled when they are first used.
"""

import os
import platform
import runpy
import shlex
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CPU = Path("src/kvframe_kernels/cpu")
variants = runpy.run_path(str(CPU / "variants.py"))
machine = os.environ.get("KVFRAME_KERNELS_MACHINE", platform.machine())
prebuilt_variants = variants["VARIANTS"].get(machine, ()) if os.environ.get("KVFRAME_KERNELS_PREBUILT") else ()


class WithKernels(Distribution):
    """A distribution that contains compiled code if any variant is prebuilt."""

    def has_ext_modules(self) -> bool:
        """Return whether the wheel is for one kind of machine."""
        return bool(prebuilt_variants)


class BuildWithKernels(build_py):
    """Add a library for each variant."""

    def run(self) -> None:
        """Copy the sources, then compile."""
        super().run()
        for variant in prebuilt_variants:
            library = Path(self.build_lib, "kvframe_kernels", "cpu", "lib", f"{variant.name}.so")
            self.mkpath(str(library.parent))
            compiler = shlex.split(os.environ.get("CXX", "c++"))
            command = [*compiler, *variants["FLAGS"], *variant.flags, "-s", "-o", str(library)]
            subprocess.run([*command, str(CPU / "src" / "attention.cpp")], check=True)


class WheelOfMachine(bdist_wheel):
    """Name the machine, and no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the wheel's tags: Python, its ABI and the platform."""
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if prebuilt_variants else tag


setup(distclass=WithKernels, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfMachine})
