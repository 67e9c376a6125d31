"""Without kvframe-engine, the core plans, explains and checks, and says what to install for the rest."""

from __future__ import annotations

import subprocess
import sys

_WITHOUT = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "kvframe_engine":
            raise ModuleNotFoundError("No module named 'kvframe_engine'", name=name)
sys.meta_path.insert(0, Hide())
"""


def run_without(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _WITHOUT + code], capture_output=True, text=True, check=False)


_ASK = """
import kvframe
for name in ("Engine", "Embedder", "SamplingParams", "Prompt"):
    try:
        getattr(kvframe, name)
    except Exception as error:
        print(error)
"""


def test_a_name_of_the_engine_says_what_to_install() -> None:
    lines = run_without(_ASK).stdout.splitlines()
    for name, line in zip(("Engine", "Embedder", "SamplingParams", "Prompt"), lines, strict=True):
        assert f"kvframe.{name} is a part of kvframe-engine, which is not installed; try: pip install" in line


def test_the_core_plans_and_explains() -> None:
    calls = [
        f"main(['{command}', 'examples/layers/gemma_3_27b.json', '--json'], standalone_mode=False)"
        for command in ("plan", "explain")
    ]
    process = run_without("\n".join(["from kvframe.cli import main", *calls]))
    assert (0, "") == (process.returncode, process.stderr)
    assert all(key in process.stdout for key in ('"groups"', '"reason"'))


def test_the_kit_checks_a_backend() -> None:
    process = run_without(
        "import pkgutil, importlib, kvframe_testing as kit\n"
        "for module in pkgutil.iter_modules(kit.__path__): importlib.import_module('kvframe_testing.' + module.name)\n"
        "from kvframe.cli import main; main(['check', 'torch_reference', '--only', 'full-block=16-decode'])"
    )
    assert "backend 'torch_reference' of kvframe: 1 of 1 checks passed" in process.stdout, process.stderr


def test_a_model_adapter_is_not_checked() -> None:
    process = run_without("from kvframe.cli import main; main(['check', 'transformers', '--model', 'any'])")
    assert "is a part of kvframe-engine, which is not installed" in " ".join(process.stdout.split())


def test_a_failure_of_the_engine_itself_is_not_hidden() -> None:
    broken = "sys.meta_path.pop(0); sys.modules['numpy'] = None\nimport kvframe; kvframe.Engine"
    process = run_without(broken)
    assert "kvframe-engine, which is not installed" not in process.stderr
    assert "numpy" in process.stderr
