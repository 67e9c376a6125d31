"""``kvframe doctor``: what it finds here, and what counts as broken."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result
from kvframe_sliding_window.spec import SlidingWindowSpec

from kvframe.cli import doctor, main
from kvframe.cli.model_check import check_model
from kvframe.cli.store_check import check_stores
from kvframe.config.stack import Stack
from kvframe.loading.plugins import load_plugins
from tests.loading.fake_distributions import MANIFEST, FakeSite, registers
from tests.support.stores import ShelfStore, shelf_plugin

PLANS = "kvframe-sliding-window:sliding_window"
BACKEND = """
from kvframe.builtin.torch_reference import TorchReferenceBackend


class Fast(TorchReferenceBackend):
    @classmethod
    def unusable_reason(cls):
        return {reason}
"""


@pytest.fixture(scope="module", autouse=True)
def _packages_are_listed_once() -> Iterator[None]:
    packages = importlib.metadata.packages_distributions()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "packages_distributions", lambda: packages)
        yield


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def examine(expected_code: int = 0) -> Any:
    result = run("--json")
    assert (expected_code, "") == (result.exit_code, result.stderr), result.output
    return json.loads(result.stdout)


def names_of(found: Any, plugin: str) -> dict[str, tuple[str, str]]:
    return {each["name"]: (each["state"], each["reason"]) for each in found["names"] if each["plugin"] == plugin}


def test_the_workspace_is_healthy_and_fits_80_columns() -> None:
    result = run()
    assert (0, "") == (result.exit_code, result.stderr)
    titles = [line for line in result.stdout.splitlines() if line and not line.startswith(" ")]
    usual = ["Versions", "Devices", "Libraries", "Plugins", "Not usable here, and no fault", "Problems", "Type"]
    assert usual == titles
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_versions_devices_and_plugins_are_those_of_this_process() -> None:
    found = examine()
    assert importlib.metadata.version("torch") == found["versions"]["torch"]
    assert {"attrs", "click", "numpy", "transformers"} <= set(found["versions"])
    assert not any(name.startswith("kvframe-") for name in found["versions"])
    assert "cpu" == found["devices"][0]["device"]
    assert found["devices"][0]["free_bytes"] <= found["devices"][0]["total_bytes"]
    version = importlib.metadata.version("kvframe-mla")
    assert {"id": "kvframe-mla:mla", "version": version, "status": "loaded", "reason": ""} in found["plugins"]
    assert ("usable", "") == names_of(found, "kvframe-torch:torch")["torch"]
    assert [] == found["problems"]
    assert "kvframe plan MODEL to see what its cache takes" == found["next"][0]


def test_a_library_that_is_not_installed_is_no_fault(site: FakeSite) -> None:
    manifest = MANIFEST + (
        "@hookimpl\ndef kvframe_register_backends(register):\n"
        "    register('fast', 'acme_fast.fast:Fast', needs='acme_lib.core', install='pip install acme-lib')\n"
    )
    site.add("acme-fast", "fast", manifest)
    found = examine()
    assert {"fast": ("missing", "needs acme_lib.core; try: pip install acme-lib")} == names_of(found, "acme-fast:fast")
    (library,) = (each for each in found["libraries"] if each["module"] == "acme_lib")
    assert {
        "module": "acme_lib",
        "version": "",
        "installed": False,
        "needed_by": ["backend fast"],
        "install": "pip install acme-lib",
    } == library


def test_a_backend_that_cannot_run_here_is_no_fault(site: FakeSite) -> None:
    manifest = registers("backends", ("fast", "acme_fast.fast:Fast"))
    site.add("acme-fast", "fast", manifest, files={"fast": BACKEND.format(reason="'needs an abacus'")})
    found = examine()
    assert {"fast": ("unusable", "needs an abacus")} == names_of(found, "acme-fast:fast")


@pytest.mark.parametrize(
    ("manifest", "files", "says"),
    [
        ("raise RuntimeError('no luck')", {}, "plugin acme-fast:fast is broken: "),
        (registers("backends", ("fast", "acme_fast.none:Fast")), {}, "backend fast of acme-fast:fast is broken: "),
        (registers("backends", ("fast", "acme_fast.fast:Fast")), {"fast": "Fast = 1 / 0"}, "ZeroDivisionError"),
        (
            registers("backends", ("fast", "acme_fast.fast:Fast")),
            {"fast": BACKEND.format(reason="1 / 0")},
            "unusable_reason()",
        ),
    ],
)
def test_what_is_broken_is_a_problem(manifest: str, files: dict[str, str], says: str, site: FakeSite) -> None:
    site.add("acme-fast", "fast", manifest, files=files)
    problems = examine(doctor.BROKEN_EXIT_CODE)["problems"]
    assert [True] == [says in problem for problem in problems if "acme-fast" in problem][:1], problems
    assert 1 == run().exit_code


def test_a_plugin_of_another_contract_is_a_problem(site: FakeSite) -> None:
    site.add("acme-late", "late", api="v1_99")
    (problem,) = examine(doctor.BROKEN_EXIT_CODE)["problems"]
    assert problem.startswith("plugin acme-late:late is incompatible: ")


def test_a_group_of_entry_points_that_is_misspelt_is_a_problem(site: FakeSite) -> None:
    site.add("acme-fast", "fast", group="kvframe.v1s", api=None)
    (problem,) = examine(doctor.BROKEN_EXIT_CODE)["problems"]
    assert problem.startswith("acme-fast lists entry points in the group 'kvframe.v1s', which kvframe does not read")


def test_a_name_that_two_plugins_claim_is_a_problem(site: FakeSite) -> None:
    for name in ("fast", "quick"):
        site.add(f"acme-{name}", name, registers("backends", ("both", f"acme_{name}.fast:Fast")), files={"fast": ""})
    assert (
        "backend both is claimed by acme-fast and acme-quick: choose one in the stack, "
        '[plugins.owners.backend] both = "acme-fast"'
    ) == examine(doctor.BROKEN_EXIT_CODE)["problems"][0]


def test_a_library_that_is_too_old_is_a_problem(site: FakeSite) -> None:
    manifest = MANIFEST + (
        "@hookimpl\ndef kvframe_register_specs(register):\n"
        "    register('fast', 'acme_fast:Fast', needs_versions='acme-lib>=2', install='pip install acme-lib')\n"
    )
    site.add("acme-fast", "fast", manifest)
    site.write_metadata("acme-lib", "", version="1.5")
    (problem,) = examine(doctor.BROKEN_EXIT_CODE)["problems"]
    assert problem.startswith(
        "spec fast of acme-fast:fast is broken: needs acme-lib>=2, not 1.5 as installed here; try: pip"
    )


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        ("acme-none>=2", "acme-fast needs acme-none>=2, and it is not installed: pip install 'acme-none>=2'"),
        ("acme-lib>=2", "acme-fast needs acme-lib>=2, and 1.5 is installed: pip install 'acme-lib>=2'"),
        ("numpy (", "acme-fast: its requirement numpy ( cannot be read: "),
        ("acme-none; python_version < '3'", None),
        ("acme-none; extra == 'gpu'", None),
        ("acme-lib>=1", None),
    ],
)
def test_a_requirement_that_is_not_met_is_a_problem(
    needs: str, says: str | None, site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("acme-fast", "fast")
    site.write_metadata("acme-lib", "", version="1.5")
    requires = importlib.metadata.requires
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [needs] if name == "acme-fast" else requires(name))
    problems = examine(0 if says is None else 1)["problems"]
    assert [] == problems if says is None else problems[0].startswith(says)


def test_a_torch_that_cannot_be_imported_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    done = subprocess.run(
        [sys.executable, "-m", "kvframe", "doctor", "--json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (1, "") == (done.returncode, done.stderr)
    found = json.loads(done.stdout)
    assert (
        "torch cannot be imported: ImportError: libcudart.so.13: cannot open shared object file"
        == (found["problems"][0])
    )
    assert [] == found["devices"]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
from kvframe.__main__ import run
run()
"""


def test_a_missing_torch_is_no_fault_where_only_plans_are_made(tmp_path: Path) -> None:
    others = [record.name for record in load_plugins().records if record.id not in ("kvframe:builtin", PLANS)]
    stack = tmp_path / "stack.toml"
    stack.write_text(f"[plugins]\ndisabled = {json.dumps(others)}\n", encoding="utf-8")

    def check(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_TORCH, "doctor", "--stack", str(stack), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = check()
    assert (0, "") == (done.returncode, done.stderr)
    said = " ".join(done.stdout.split())
    assert "torch is not installed: kvframe plans layer files and manages caches, and runs no model" in said
    assert "pip install -r requirements.txt to run models" in said
    assert "Problems none" in said
    # A model is asked for, and needs it.
    done = check("examples/layers/gemma_3_27b.json", "--json")
    assert (1, ["torch is not installed; try: pip install torch"]) == (
        done.returncode,
        json.loads(done.stdout)["problems"],
    )


@pytest.mark.parametrize(
    ("disabled", "says"),
    [
        ('"transformers"', "pip install -e plugins/transformers to read Hugging Face models"),
        (
            '"cpu", "numba", "torch", "flex", "mla", "triton"',
            "pip install -e plugins/torch for a backend that is not slow on purpose",
        ),
    ],
)
def test_what_to_type_follows_from_what_is_usable(
    disabled: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    stack = tmp_path / "stack.toml"
    stack.write_text(f"[plugins]\ndisabled = [{disabled}]\n")
    result = run("--stack", stack)
    assert 0 == result.exit_code
    assert result.stdout.rstrip().endswith(says)


# --- of a model -------------------------------------------------------------------------------------------------------


LAYERS = Path(__file__).resolve().parents[2] / "examples" / "layers"


def without(tmp_path: Path, *plugins: str) -> Path:
    stack = tmp_path / "stack.toml"
    stack.write_text(f'[plugins]\ndisabled = {json.dumps(plugins)}\n[model]\ndevice = "cpu"\ndtype = "float32"\n')
    return stack


def test_a_model_that_can_be_served_is_described(tmp_path: Path) -> None:
    result = run(LAYERS / "gemma_3_27b.json", "--stack", without(tmp_path, "numba"))
    assert (0, "") == (result.exit_code, result.stderr)
    (facts,) = re.findall(r"\nModel\n(.*?)\n\n", result.stdout, re.DOTALL)
    assert [
        "layers    52 sliding_window, 10 full_attention",
        "runs on   cpu, float32",
        "backends  kvframe-cpu:cpu",
    ] == [line.strip() for line in facts.splitlines()]


def test_what_a_model_lacks_is_one_line_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    stack = Stack.from_file(without(tmp_path, "sliding_window", "mamba"))
    # As if the two were not installed.
    host = attrs.evolve(load_plugins(stack.plugins), records=())
    checked = check_model(LAYERS / "phi_4_mini_flash.toml", stack, host)
    assert (
        "the model needs the attention type 'mamba', which kvframe-mamba provides",
        "the model needs the attention type 'sliding_window', which kvframe-sliding-window provides",
    ) == checked.problems
    assert "pip install -e plugins/mamba -e plugins/sliding_window" == checked.install


def test_what_is_installed_and_not_loaded_is_not_installed_again(tmp_path: Path) -> None:
    stack = without(tmp_path, "sliding_window", "mamba")
    result = run(LAYERS / "phi_4_mini_flash.toml", "--stack", stack, "--json")
    found = json.loads(result.stdout)
    assert [
        f"the model needs the attention type '{name}', which kvframe-{name.replace('_', '-')} provides; "
        f"its plugin is disabled: {stack} disables it"
        for name in ("mamba", "sliding_window")
    ] == found["problems"]
    assert ["kvframe doctor, after the problems are solved"] == found["next"]
    assert 1 == result.exit_code


def test_a_wrapper_and_a_type_of_nobody_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.toml"
    own.write_text('max_model_len = 64\n[[layers]]\nname = "a"\nkind = "own"\nnum_kv_heads = 1\nhead_size = 8\n')
    found = json.loads(run(own, "--json").stdout)
    assert ["the model needs the attention type 'own', which no package of kvframe provides"] == found["problems"]
    assert ["kvframe doctor, after the problems are solved"] == found["next"]
    monkeypatch.setattr(SlidingWindowSpec, "default_wrappers", ("chunked_local",))
    stack = without(tmp_path, "chunked_local")
    found = json.loads(run(LAYERS / "gemma_3_27b.json", "--stack", stack, "--json").stdout)
    assert found["problems"][0].startswith(
        "the model needs the wrapper 'chunked_local', which kvframe-chunked-local provides; its plugin is disabled"
    )


def test_a_model_that_cannot_be_served_is_a_problem(tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text('[[rules]]\nlayers = "*"\nbackend = "mla"\n')
    result = run(LAYERS / "gemma_3_27b.json", "--stack", stack, "--json")
    assert 1 == result.exit_code
    assert "backend 'mla', which cannot serve it" in json.loads(result.stdout)["problems"][-1]


# --- page stores ------------------------------------------------------------------------------------------------------


def stack_with(tmp_path: Path, cache: str) -> Path:
    stack = tmp_path / "stack.toml"
    stack.write_text(f"[cache]\n{cache}\n", encoding="utf-8")
    return stack


def test_a_page_store_is_opened(tmp_path: Path) -> None:
    stack = stack_with(tmp_path, f'disk = {{ path = "{tmp_path / "pages"}", size = "64MiB" }}')
    result = run("--stack", stack, "--json")
    assert (0, {"disk": "opens, holds 64.00 MiB"}) == (result.exit_code, json.loads(result.stdout)["page_stores"])
    assert "Page stores\n  disk  opens, holds 64.00 MiB\n" in run("--stack", stack).stdout
    stack = stack_with(tmp_path, f'prefix_caching = false\ndisk = {{ path = "{tmp_path / "none"}", size = "64MiB" }}')
    assert {} == json.loads(run("--stack", stack, "--json").stdout)["page_stores"]
    assert not (tmp_path / "none").exists()


def test_an_event_publisher_is_opened(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/events"
    result = run("--stack", stack_with(tmp_path, f'events = "{address}"\nkey = "{"ab" * 32}"'), "--json")
    assert (0, {"zmq": "opens"}) == (result.exit_code, json.loads(result.stdout)["event_publishers"])
    result = run("--stack", stack_with(tmp_path, f'events = "{address}"'))
    assert "Event publisher\n  zmq  opens, but no router has the secret: set key in [cache]\n" in result.stdout
    result = run("--stack", stack_with(tmp_path, f'events = "ipc://{tmp_path}/nowhere/events"'), "--json")
    (problem,) = json.loads(result.stdout)["problems"]
    assert (1, True) == (result.exit_code, problem.startswith("event publisher 'zmq' cannot be opened now: "))
    assert problem.endswith("; if an engine of this stack runs here, it has the address")


@pytest.mark.parametrize(
    ("cache", "sentence"),
    [
        (
            'disk = { path = "FOLDER/file/pages", size = "64MiB" }',
            r"page store 'disk' cannot be opened now: .*FOLDER/file/pages/kvframe-pages-1, cannot be made",
        ),
        ('disk = { path = "FOLDER" }', r"cache\.disk: page store 'disk': .*size"),
        ('stores = ["nowhere"]', r"there is no page store named 'nowhere'; known: disk"),
    ],
)
def test_a_page_store_that_cannot_be_used_is_a_problem(cache: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("--stack", stack_with(tmp_path, cache.replace("FOLDER", str(tmp_path))), "--json")
    found = json.loads(result.stdout)
    assert (1, {}) == (result.exit_code, found["page_stores"])
    assert re.search(sentence.replace("FOLDER", str(tmp_path)), "\n".join(found["problems"])), found["problems"]


def test_a_secret_that_others_can_read_is_a_problem(tmp_path: Path) -> None:
    stack = stack_with(tmp_path, f'disk = {{ path = "{tmp_path / "pages"}", size = "64MiB" }}')
    assert 0 == run("--stack", stack).exit_code
    (secret,) = (tmp_path / "pages").glob("*/secret")
    secret.chmod(0o644)
    result = run("--stack", stack, "--json")
    (problem,) = json.loads(result.stdout)["problems"]
    assert (1, True) == (result.exit_code, "chmod 600" in problem), problem


def test_stores_without_a_secret_need_a_key(tmp_path: Path) -> None:
    def problems(**cache: Any) -> list[str]:
        registry = load_plugins(plugins=[shelf_plugin()]).registry
        return list(check_stores(Stack.from_mapping({"cache": {"stores": ["shelf"], **cache}}), registry).problems)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShelfStore, "local_secret", lambda self: None)
        (problem,) = problems()
        assert "page store 'shelf' keeps no secret: set key in [cache] to 64 hexadecimal digits" in problem
        assert [] == problems(key="7" * 64)
    assert [] == problems()
