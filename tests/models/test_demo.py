"""The demo's trained model: its answers need old pages, and every token equals that of ``generate()``."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest

from tests.support.commands import run

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    sys.path.insert(0, str(DEMO))
    try:
        import demo
    finally:
        sys.path.remove(str(DEMO))
    return demo


@pytest.fixture(scope="module")
def training(demo: ModuleType) -> ModuleType:
    return sys.modules[demo.make_model.__module__]


@pytest.fixture(scope="module")
def small_recipe(training: ModuleType) -> Any:
    """A recipe for two layers that learn to copy as well as the demo's, in a tenth of the time."""
    phases = [(0.8, 6, 168), (0.2, 3, 416)]
    return training.Recipe(
        modules=("textwrap",),
        num_layers=2,
        hidden_size=64,
        intermediate_size=192,
        steps=300,
        learning_rate=1e-2,
        phases=tuple(training.Phase(share=share, rows=rows, tokens=tokens) for share, rows, tokens in phases),
    )


@pytest.fixture(scope="module", params=["small", pytest.param("default", marks=pytest.mark.whole)])
def trained_path(request: pytest.FixtureRequest, training: ModuleType, small_recipe: Any) -> Path:
    path, recipe = training.DEFAULT_PATH, training.DEFAULT_RECIPE
    if request.param == "small":
        path, recipe = path.with_name("small-demo-model"), small_recipe
    trained = training.make_model(path, recipe)
    assert trained.loss < 1.0
    assert trained.copied > 0.95
    assert training.make_model(path, recipe).cached
    return path


def test_the_demo_serves_the_tokens_of_generate(demo: ModuleType, trained_path: Path) -> None:
    served = demo.serve(trained_path)
    assert len(served.outputs) >= 32
    assert len(served.outputs) == served.num_equal
    assert served.stats["prefix_hit_rate"] > 0.8
    assert served.stats["peak_bytes_held"] * 3 < served.dense_bytes
    report = demo.report(served)
    right, total = re.search(r"far copies +(\d+) of (\d+) tokens", report).groups()
    assert int(total) == demo.NUM_COPY_PROMPTS * demo.SEGMENT_TOKENS
    assert int(right) > 0.9 * int(total)
    assert "equal tokens  32 of 32 requests" in report
    assert "layers of sliding_window need 31 of 511 past tokens: at most" in report
    assert "layers of full_attention need 511 of 511 past tokens: at most" in report
    assert report.isascii(), "a text of the model is shown"


def test_what_the_demo_says_to_type_runs(
    demo: ModuleType, trained_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    title, *lines = demo.next_steps(trained_path).splitlines()
    commands = [shlex.split(re.split(r" {2,}", line.strip())[0]) for line in lines]
    assert ("Type next:", {"bin/kvframe"}) == (title, {program for program, *_ in commands})
    assert ["chat", "Qwen/Qwen3-0.6B"] == commands.pop()[1:]  # it would be downloaded
    for _, *arguments in commands:
        result = run(*arguments)
        assert 0 == result.exit_code, result.output
    assert (tmp_path / "plan.html").exists()


def test_a_wrong_token_is_seen(demo: ModuleType, trained_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NUM_CODE_PROMPTS", 2)
    monkeypatch.setattr(demo, "NUM_COPY_PROMPTS", 0)
    served = demo.serve(trained_path)
    served.expected[1][3] += 1
    assert served.num_equal == 1
    assert "1 of 2 requests have every token" in demo.report(served)


def test_another_recipe_trains_another_model(training: ModuleType, small_recipe: Any, tmp_path: Path) -> None:
    recipes = [attrs.evolve(small_recipe, steps=steps) for steps in (1, 1, 2)]
    results = [training.make_model(tmp_path / "model", recipe) for recipe in recipes]
    assert [False, True, False] == [trained.cached for trained in results]
    assert ["model", "model.lock"] == sorted(path.name for path in tmp_path.iterdir())
