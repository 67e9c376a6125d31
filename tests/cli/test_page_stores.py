"""``kvframe generate`` with a disk: later processes continue from what earlier ones computed, also from killed ones."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from kvframe_engine.commands import generate as generating
from kvframe_transformers.testing import save_tiny

from kvframe import Engine
from tests.models.serving import ids
from tests.programs import run_program, start_program
from tests.support.commands import run

PROMPTS = [[*ids(3, 600), *ids(6, 3)], [*ids(3, 600), *ids(7, 19)]]
"""They are so long that requests wait for the disk on a busy machine too."""


FAMILIES = {"llama": 1, "gemma3_text": 2, "mamba2": 1}
"""Models of full attention, of windows and of states, with their numbers of cache groups."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the family's name, with a model and prompts."""
    folder: Path = tmp_path_factory.mktemp("stored") / request.param
    folder.mkdir()
    save_tiny(folder / "model", request.param, max_position_embeddings=2048)
    (folder / "prompts.json").write_text(json.dumps(PROMPTS), encoding="utf-8")
    return folder


def command(folder: Path, pages: Path | None, *, num_new_tokens: int) -> list[str]:
    stack = folder / "stack.toml"
    disk = "" if pages is None else f"disk = {{ path = {json.dumps(str(pages))}, size = '64MiB' }}\n"
    stack.write_text(
        f"[model]\ndevice = 'cpu'\ndtype = 'float32'\n[cache]\nmemory = '8MiB'\nblock_size = 4\n{disk}",
        encoding="utf-8",
    )
    asked = [
        "--prompt-token-ids",
        str(folder / "prompts.json"),
        "--max-new-tokens",
        str(num_new_tokens),
        "--ignore-eos",
    ]
    return ["-m", "kvframe", "generate", str(folder / "model"), "--stack", str(stack), *asked, "--json"]


def generate(folder: Path, pages: Path | None, *, num_new_tokens: int = 20) -> dict[str, Any]:
    done = run_program(*command(folder, pages, num_new_tokens=num_new_tokens))
    assert 0 == done.returncode, done.stderr
    assert done.stderr.endswith("MiB; prefixes also in disk\n" if pages else "MiB\n")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def tokens(answer: dict[str, Any]) -> list[list[int]]:
    return [output["token_ids"] for output in answer["outputs"]]


def test_the_next_process_continues_from_the_first_ones_prompts(folder: Path, tmp_path: Path) -> None:
    expected = tokens(generate(folder, None))
    first, second = generate(folder, tmp_path / "pages"), generate(folder, tmp_path / "pages")
    assert [expected, expected] == [tokens(first), tokens(second)]
    assert [[], []] == [output["cached"]["restored_from"] for output in first["outputs"]]
    # All whole blocks but the one of the last token.
    assert 600 == second["outputs"][0]["cached"]["num_tokens"] == second["outputs"][0]["cached"]["restored_tokens"]
    assert ["disk"] == second["outputs"][0]["cached"]["restored_from"]
    assert second["stats"]["restored_blocks"]["disk"] > 0
    of_first, of_second = first["stats"]["stores"]["disk"], second["stats"]["stores"]["disk"]
    assert of_first["pages_stored"] > of_second["pages_stored"] >= 0
    assert (0, 0, 0) == tuple(of_second[name] for name in ("pages_dropped", "pages_refused", "failures"))


def test_a_killed_process_leaves_pages_that_are_right(folder: Path, tmp_path: Path) -> None:
    expected = tokens(generate(folder, None, num_new_tokens=60))
    pages = tmp_path / "pages"
    with tempfile.TemporaryFile() as out:
        running = start_program(
            command(folder, pages, num_new_tokens=1200), {1: out.fileno(), 2: out.fileno()}, cwd=folder
        )
        # A file for each cache group: the pages of the prompts.
        while len(list(pages.glob("*/records/*"))) < FAMILIES[folder.name]:
            running.join(0.005)
            assert running.exitcode is None, "it ended before it was killed"
        running.kill()
        running.join()
    assert -9 == running.exitcode
    second = generate(folder, pages, num_new_tokens=60)
    assert expected == tokens(second)
    assert 0 < second["stats"]["restored_tokens"]


def test_what_was_generated_is_printed_if_ctrl_c_ends_the_wait_for_stores(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(engine: Engine, seconds: float) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "flush_page_stores", interrupted)
    result = run(*command(folder, tmp_path / "pages", num_new_tokens=2)[2:])
    assert 130 == result.exit_code
    assert [2, 2] == [len(each) for each in tokens(json.loads(result.stdout))]


def test_a_store_that_takes_too_long_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "flush_page_stores", lambda engine, seconds: False)
    monkeypatch.setattr(generating, "_MOST_FLUSH_SECONDS", 0.0)
    result = run(*command(folder, tmp_path / "pages", num_new_tokens=2)[2:])
    assert (0, True) == (result.exit_code, "page stores took not all pages in 0 seconds" in result.stderr)
