"""The demo's trained model: its answers need old pages, and every token equals that of ``generate()``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
def trained_path(demo: ModuleType) -> Path:
    trained = demo.make_model()
    assert trained.loss < 1.0
    assert trained.copied > 0.95
    assert demo.make_model().cached
    return Path(trained.path)


def test_the_demo_serves_what_generate_gives(demo: ModuleType, trained_path: Path) -> None:
    served = demo.serve(trained_path)
    assert len(served.outputs) >= 32
    assert len(served.outputs) == served.num_equal
    assert served.stats["prefix_hit_rate"] > 0.8
    assert served.stats["peak_bytes_held"] * 3 < served.dense_bytes
    report = demo.report(served)
    right, asked = re.search(r"copied right +(\d+) of (\d+) tokens", report).groups()
    assert int(asked) == demo.NUM_COPY_PROMPTS * demo.SEGMENT_TOKENS
    assert int(right) > 0.9 * int(asked)
    assert "32 of 32 requests, token by token" in report


def test_a_wrong_token_is_seen(demo: ModuleType, trained_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NUM_CODE_PROMPTS", 2)
    monkeypatch.setattr(demo, "NUM_COPY_PROMPTS", 0)
    served = demo.serve(trained_path)
    served.expected[1][3] += 1
    assert served.num_equal == 1
    assert "1 of 2 requests" in demo.report(served)


def test_another_recipe_trains_another_model(demo: ModuleType, tmp_path: Path) -> None:
    first = demo.make_model(tmp_path / "model", steps=1)
    again = demo.make_model(tmp_path / "model", steps=1)
    other = demo.make_model(tmp_path / "model", steps=2)
    assert [False, True, False] == [trained.cached for trained in (first, again, other)]
    assert ["model", "model.lock"] == sorted(path.name for path in tmp_path.iterdir())
