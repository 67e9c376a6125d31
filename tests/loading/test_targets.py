"""Whether a registered class exists, found without importing it; and the output of ``kvframe plugins`` about it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvframe.loading.plugins import load_plugins
from kvframe.loading.targets import find_problem
from tests.loading.fake_distributions import FakeSite, registers
from tests.support.commands import run, run_json

MODULE = """
import os.path as path
from os import *
class Here: pass
try:
    from os import sep as Imported
except ImportError:
    Imported = None
if True:
    First, (Second, *Third) = 1, (2, 3)
    Annotated: int = 5
def made(): Inner = 5
for Looped in (): pass
"""


@pytest.fixture
def things(site: FakeSite) -> FakeSite:
    """A package with modules of every kind, none of which may be imported."""
    raises = "raise SystemExit('imported')\n"
    files = {
        "closed": raises + MODULE.replace("from os import *\n", ""),
        "open": raises + MODULE,
        "computed": raises + "def __getattr__(name): return 5\n",
        "torn": "class Here(:\n",
    }
    site.add("kvframe-things", "things", registers("backends"), files=files)
    (site.root / "kvframe_things/__init__.py").write_text(raises)
    (site.root / "kvframe_things/null.py").write_bytes(b"\0")
    return site


@pytest.mark.parametrize(
    "target",
    [
        *(f"closed:{name}" for name in ("Here", "Imported", "First", "Third", "Annotated", "made", "Looped", "path")),
        "closed:Here.Nested",
        "open:Anything",
        "computed:Anything",
    ],
)
def test_a_name_that_a_module_binds_is_found_without_an_import(things: FakeSite, target: str) -> None:
    assert "" == find_problem(f"kvframe_things.{target}")
    assert "kvframe_things" not in sys.modules


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("kvframe_things.closed:Gone", "module 'kvframe_things.closed' defines no 'Gone'"),
        ("kvframe_things.closed:Inner", "module 'kvframe_things.closed' defines no 'Inner'"),
        ("kvframe_things.gone:Here", "there is no module 'kvframe_things.gone'"),
        ("kvframe_things.closed.inner:Here", "there is no module 'kvframe_things.closed.inner'"),
        ("kvframe_gone:Here", "there is no module 'kvframe_gone'"),
        ("kvframe_things.torn:Here", "module 'kvframe_things.torn' is not valid Python: SyntaxError: invalid syntax"),
    ],
)
def test_a_name_that_nothing_binds_is_missing(things: FakeSite, target: str, problem: str) -> None:
    assert problem == find_problem(target)


def test_a_module_that_is_no_text_is_not_valid(things: FakeSite) -> None:
    assert find_problem("kvframe_things.null:Here").startswith("module 'kvframe_things.null' is not valid Python: ")


def test_a_built_in_module_can_only_be_imported() -> None:
    assert "" == find_problem("sys:no_such_name")


def test_every_registered_class_of_this_repository_is_found() -> None:
    catalogues = load_plugins().registry.catalogues.values()
    targets = [entry.target for catalogue in catalogues for entry in catalogue.claims()]
    assert {""} == {find_problem(str(target)) for target in targets}


BACKENDS = """
from kvframe.builtin.torch_reference import TorchReferenceBackend
class Good(TorchReferenceBackend): pass
class Asks(TorchReferenceBackend):
    @classmethod
    def unusable_reason(cls): raise SystemExit("no device")
class Bare(TorchReferenceBackend):
    capabilities = None
"""


def usable(site: FakeSite, *options: str) -> dict[str, Any]:
    """Return the output of ``kvframe plugins`` about backends that exist, and about one that does not."""
    claims = [(name.lower(), f"kvframe_four.backends:{name}") for name in ("Good", "Asks", "Bare", "Gone")]
    site.add("kvframe-four", "four", registers("backends", *claims), files={"backends": BACKENDS})
    names = run_json("plugins", "--json", *options)["names"]
    return {target["name"]: target["problem"] for target in names if target["plugin"] == "kvframe-four:four"}


def test_a_class_that_is_not_there_is_said_to_be_missing(site: FakeSite) -> None:
    missing = "module 'kvframe_four.backends' defines no 'Gone'"
    assert {"good": "", "asks": "", "bare": "", "gone": missing} == usable(site)


def test_a_class_that_was_only_found_is_not_called_usable(site: FakeSite) -> None:
    usable(site)
    answer = run("plugins", "--verbose")
    (good,) = (line for line in answer.stdout.splitlines() if line.split()[:2] == ["backend", "good"])
    assert good.endswith("not imported")


def test_check_imports_each_class_and_asks_it(site: FakeSite) -> None:
    problems = usable(site, "--check")
    assert "" == problems["good"]
    assert "backend 'kvframe-four:asks': unusable_reason() failed: SystemExit: no device" == problems["asks"]
    assert "declares capabilities = None, which is not Capabilities" in problems["bare"]
    assert "defines no 'Gone'" in problems["gone"]
