"""Pages with pictures: one file that loads nothing, right figures, and names that cannot break out of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kvframe_transformers.testing import save_tiny

from kvframe.cli import main
from tests.covering import few
from tests.support.commands import run, run_json

LAYERS = Path(__file__).resolve().parents[2] / "examples" / "layers"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def page_of(path: Path, model: str | Path, *options: str) -> str:
    file = path / "page.html"
    result = run("plan", str(model), "--cache-memory", "1GiB", "--html", str(file), *options)
    assert result.exit_code == 0, result.output
    return file.read_text(encoding="utf-8")


def data_of(page: str) -> Any:
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_a_plan_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = page_of(tmp_path, LAYERS / "gemma_3_27b.json", "--max-model-len", "4096")
    assert {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"} == set(re.findall(r"https?://[^\"' ]+", page))
    assert [] == re.findall(r"<link|<img|@import|url\(|\bsrc=|fetch\(|XMLHttpRequest", page)


def test_its_samples_are_what_the_groups_keep(tmp_path: Path) -> None:
    data = data_of(page_of(tmp_path, LAYERS / "gemma_3_27b.json", "--max-model-len", "4096", "--dtype", "bfloat16"))
    window, full = data["groups"]
    assert ("sliding_window", 52, "full_attention", 10) == (
        window["kind"],
        window["num_layers"],
        full["kind"],
        full["num_layers"],
    )
    last = data["samples"][-1]
    assert (4096, [[[3073, 4096]], [[0, 4096]]]) == (last["n"], last["ranges"])
    # Blocks of 16 tokens: the window's last 1,023 tokens lie in 64 of them, at the end of a block.
    assert [64 * window["page_bytes"], 256 * full["page_bytes"]] == last["bytes"]
    assert 256 * (window["page_bytes"] + full["page_bytes"]) == last["all_full"]
    # Six groups of ten layers for the 52 with a window, and one for the others.
    assert (6 * 64 + 256) * full["page_bytes"] == last["equal_groups"]
    assert [0, 0] == data["samples"][0]["bytes"]


def test_a_page_says_dtype_device_and_what_the_device_holds(tmp_path: Path) -> None:
    file, stack = tmp_path / "page.html", tmp_path / "stack.toml"
    stack.write_text('[model]\ndevice = "cuda:1"\n', encoding="utf-8")
    asked = ["plan", str(LAYERS / "gemma_3_27b.json"), "--memory", "80GB", "--html", str(file), "--stack", str(stack)]
    planned, data = run_json(*asked), data_of(file.read_text(encoding="utf-8"))
    assert ("bfloat16", "cuda:1", planned["device"]) == (data["dtype"], data["runs_on"], data["device"])
    if CHROMIUM is not None:
        shown = shown_by_chromium(file)
        assert "bfloat16 · on cuda:1 · " in shown
        assert "weights 50.3 GiB" in shown
        assert "It starts. The longest request: 131,072 of 131,072 tokens." in shown
        assert ">every layer keeps every token</text>" in shown
        assert '<p id="no_cache" hidden' in shown


def test_a_model_without_a_cache_has_a_page_that_says_so(tmp_path: Path) -> None:
    save_tiny(tmp_path / "bert", "bert")
    page = page_of(tmp_path, tmp_path / "bert")
    assert ([], "float32") == (data_of(page)["groups"], data_of(page)["dtype"])
    if CHROMIUM is not None:
        shown = shown_by_chromium(tmp_path / "page.html")
        assert '<p id="no_cache">' in shown
        assert '<div id="of_cache" hidden' in shown


def test_a_name_cannot_end_the_data(tmp_path: Path) -> None:
    layers = json.loads((LAYERS / "gemma_3_27b.json").read_text(encoding="utf-8"))
    layers["name"] = "</script><script>alert(1)</script>"
    file = tmp_path / "layers.json"
    file.write_text(json.dumps(layers), encoding="utf-8")
    page = page_of(tmp_path, file, "--max-model-len", "1024")
    assert "alert(1)</script>" not in page
    assert layers["name"] == data_of(page)["model"]


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "page.html"
    result = CliRunner().invoke(
        main, ["plan", str(LAYERS / "llama_3_1_8b.toml"), "--cache-memory", "1GiB", "--html", str(file)]
    )
    assert "page.html cannot be written: " in " ".join(result.output.split())


def test_only_a_page_is_replaced(tmp_path: Path) -> None:
    page_of(tmp_path, LAYERS / "llama_3_1_8b.toml")
    assert "gemma" in page_of(tmp_path, LAYERS / "gemma_3_27b.json")
    model = tmp_path / "layers.toml"
    model.write_bytes((LAYERS / "llama_3_1_8b.toml").read_bytes())
    result = run("plan", str(model), "--cache-memory", "1GiB", "--html", str(model))
    assert "exists and is not a page; name another file" in " ".join(result.output.split())
    assert model.read_bytes() == (LAYERS / "llama_3_1_8b.toml").read_bytes()


def test_an_explanation_shows_each_choice_and_the_reasons_against_others(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    asked = ["explain", str(LAYERS / "llama_4_scout.toml"), "--json", "--html", str(file)]
    layers, page = run_json(*asked)["layers"], data_of(file.read_text(encoding="utf-8"))
    assert len(layers) == page["num_layers"] == sum(row["num_layers"] for row in page["rows"])
    chunked, full = page["rows"]
    assert ("chunked_local", True) == (chunked["kind"], chunked["wrappers"][0].startswith("chunked_local"))
    assert ("full_attention", []) == (full["kind"], full["wrappers"])
    for row in page["rows"]:
        of_row = next(each for each in layers if each["kind"] == row["kind"])
        assert of_row["backend"].endswith(row["backend"])
        assert len(of_row["others"]) == len(row["others"])
        assert all(each["reason"] for each in row["others"])


def shown_by_chromium(page: Path) -> str:
    """Return the document after its script ran."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("model", few(1, ["gemma_3_27b.json", "qwen3_next_80b.toml", "whisper_large_v3.toml"]))
def test_a_browser_shows_it(model: str, tmp_path: Path) -> None:
    page_of(tmp_path, LAYERS / model, "--dtype", "bfloat16")
    shown = shown_by_chromium(tmp_path / "page.html")
    # Its last line ran: the table of requests is filled, and the bars are drawn.
    requests = shown[shown.index('id="requests"') :]
    assert requests.count("<tr>") > 1
    assert shown.count('class="bar"') >= 2
    assert "background:var(--c0)" in shown
    assert '<section id="beside" hidden' in shown


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_a_browser_shows_what_tiers_hold(tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text(f'[cache]\ndisk = {{ path = "{tmp_path / "pages"}", size = "1TiB" }}\n', encoding="utf-8")
    page_of(tmp_path, LAYERS / "gemma_3_27b.json", "--stack", str(stack))
    shown = shown_by_chromium(tmp_path / "page.html")
    assert '<section id="beside">' in shown
    assert "1 TiB" in shown[shown.index('id="tiers"') :]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_a_browser_shows_an_explanation(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    run("explain", str(LAYERS / "llama_4_scout.toml"), "--html", str(file))
    shown = shown_by_chromium(file)
    assert 2 == shown.count('class="card"')
    assert "Why not" in shown


# --- a run ------------------------------------------------------------------------------------------------------------


def traced(path: Path) -> str:
    save_tiny(path / "model", "gemma3_text")
    prompts = path / "prompts.json"
    prompts.write_text(json.dumps([[(seed * index) % 90 + 3 for index in range(40)] for seed in range(1, 9)]))
    file = path / "page.html"
    asked = [
        "trace",
        str(path / "model"),
        "--prompt-token-ids",
        str(prompts),
        "--memory",
        "150KiB",
        "--html",
        str(file),
    ]
    result = run(*asked, "--html", str(file))
    assert result.exit_code == 0, result.output
    return file.read_text(encoding="utf-8")


def test_a_trace_page_holds_the_run(tmp_path: Path) -> None:
    page = traced(tmp_path)
    data = data_of(page)
    assert 8 == len(data["requests"]) == sum(event["what"] == "ended" for event in data["events"])
    assert [] == re.findall(r"<link|<img|@import|url\(|\bsrc=|fetch\(|XMLHttpRequest", page)


def test_a_trace_without_prompts_is_refused(tmp_path: Path) -> None:
    result = run("trace", str(tmp_path), "--html", str(tmp_path / "page.html"))
    assert "give prompts by one of --prompt, --prompts and --prompt-token-ids" in " ".join(result.output.split())


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_a_browser_shows_a_trace(tmp_path: Path) -> None:
    traced(tmp_path)
    shown = shown_by_chromium(tmp_path / "page.html")
    assert "was preempted: other requests needed its blocks or its row" in shown
    assert "red marks below" in shown
