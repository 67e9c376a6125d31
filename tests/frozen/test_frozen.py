"""What version 1.0 of the contract promised still holds: its names and signatures, and its plugins, which still run."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvframe.contract.hookspecs import API_VERSION
from tests.frozen.snapshot import take, taken_away
from tests.programs import run_program

FROZEN = Path(__file__).parent
ROOT = FROZEN.parents[1]
VERSIONS = sorted(path.name for path in FROZEN.iterdir() if (path / "contract.json").is_file())


RUN = """
import warnings
warnings.simplefilter("error")
from tests.frozen.run_plugins import main
main()
"""


def run(version: str) -> dict[str, Any]:
    """Run the plugins of a version in a process that finds their distribution beside the installed ones."""
    return found_by(run_program("-c", RUN, packages=FROZEN / version))


def run_in_a_newer_kvframe(version: str) -> dict[str, Any]:
    """Likewise, in a process that changes the contract before anything else imports it."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(FROZEN / version), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "error", "-m", "tests.frozen.run_plugins", "--newer"]
    return found_by(subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False))


def found_by(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_version_of_today_is_frozen() -> None:
    assert ["1.0"] == VERSIONS
    assert API_VERSION in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_the_plugins_of_a_version_pass_the_kit_and_serve_a_model(version: str) -> None:
    found = run(version)
    kinds = ("backend", "spec", "wrapper", "format", "eviction", "proposer", "loading")
    assert {kind: [] for kind in kinds} == found["failures"]
    assert found["model"]["equal"]
    assert [] == found["model"]["failures"]
    assert found["model"]["drafts"] > 0
    assert [] == found["deprecated"]


def test_a_newer_minor_runs_the_plugins_of_an_older_one() -> None:
    major, minor = API_VERSION.split(".")
    found = run_in_a_newer_kvframe(VERSIONS[0])
    assert f"{major}.{int(minor) + 1}" == found["api"]
    assert ("kvframe_register_later_parts", "later_field") == (found["last_hook"], found["last_field"])
    # The later argument reaches no method that does not take it; the later method and field have their defaults.
    assert [["not implemented", 7]] == found["later"]
    # A wrapper that does not know the extension is applied to the step without it.
    assert [True, False] in found["extensions"]
    assert ["kvframe_register_proposers is deprecated"] == found["deprecated"]
    assert {()} == {tuple(failures) for failures in found["failures"].values()}
    assert found["model"]["equal"]


# --- names and signatures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_that_a_version_promised_was_taken_away(version: str) -> None:
    assert [] == taken_away(json.loads((FROZEN / version / "contract.json").read_text()), take())


def test_what_is_added_is_in_the_snapshot_of_the_version_of_today() -> None:
    frozen = json.loads((FROZEN / API_VERSION / "contract.json").read_text())
    assert frozen == take(), (
        "the contract has other names than its version: raise the minor of API_VERSION and write its snapshot, "
        f"python -m tests.frozen.snapshot tests/frozen/{API_VERSION}/contract.json (before its release only)"
    )


BACKEND, HOOK = ("AttentionBackend", "members"), ("HookSpecs", "members", "kvframe_register_specs")
REQUIRED = "POSITIONAL_OR_KEYWORD"


@pytest.mark.parametrize(
    ("place", "change", "expected"),
    [
        ((), {"KVFormat": None}, "KVFormat was removed"),
        (BACKEND, {"write_kv": None}, "AttentionBackend.write_kv was removed"),
        ((*BACKEND, "attend", "parameters"), {"sinks": None}, "AttentionBackend.attend no longer takes sinks"),
        ((*BACKEND, "attend", "parameters"), {"later": REQUIRED}, "AttentionBackend.attend requires later now"),
        ((*BACKEND, "attend", "parameters"), {"later": f"{REQUIRED}, optional"}, None),
        ((*BACKEND, "bind"), {"abstract": True}, "AttentionBackend.bind must be implemented now"),
        (BACKEND, {"more": {"parameters": {}, "abstract": True}}, "AttentionBackend.more must be implemented now"),
        (BACKEND, {"more": {"parameters": {}, "abstract": False}}, None),
        (("LayerSpec", "parameters"), {"name": "KEYWORD_ONLY, optional"}, None),
        (("LayerSpec", "parameters"), {"more": "KEYWORD_ONLY"}, "LayerSpec requires more now"),
        (("FieldUse", "members"), {"CARRY": "other"}, "FieldUse.CARRY was carry and is other"),
        ((*HOOK, "parameters"), {"more": REQUIRED}, None),
        ((*HOOK, "parameters"), {"register": None}, "HookSpecs.kvframe_register_specs no longer takes register"),
    ],
)
def test_what_breaks_a_promise_is_said(place: tuple[str, ...], change: dict[str, Any], expected: str | None) -> None:
    changed = copy.deepcopy(take())
    inner = changed
    for key in place:
        inner = inner[key]
    for name, value in change.items():
        if value is None:
            del inner[name]
        else:
            inner[name] = value
    assert ([] if expected is None else [expected]) == taken_away(take(), changed)


# --- the files --------------------------------------------------------------------------------------------------------

HASHES = {"1.0": "c4f8015a5257d258"}
"""What the frozen plugins of each version hash to: they are never edited."""


@pytest.mark.parametrize("version", VERSIONS)
def test_the_frozen_plugins_are_not_edited(version: str) -> None:
    content = hashlib.sha256()
    for path in sorted((FROZEN / version).rglob("*")):
        if path.suffix in (".py", ".txt") or path.name == "METADATA":
            content.update(path.relative_to(FROZEN).as_posix().encode() + path.read_bytes())
    assert HASHES[version] == content.hexdigest()[:16]
