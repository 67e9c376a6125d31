"""The examples run as their readers would run them, and their files are valid."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kvframe_testing.laws import check_spec

from kvframe.config.stack import Stack
from kvframe.loading.plugins import load_plugins
from kvframe.planning.groups import group_layers
from kvframe.planning.layer_file import read_layer_file
from kvframe.planning.layer_specs import make_layer_specs
from tests.programs import python_in_forks, run_program
from tests.support.models import save_byte_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    process = run_program(str(EXAMPLES / name), *arguments, executable=python_in_forks())
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Return a function that runs an example as the main module of this process, which has imported torch already."""

    def run_it(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_it


def test_a_model_runs_without_arguments() -> None:
    output = run("run_a_model.py").splitlines()
    assert [24, 24, 24] == [line.count(",") + 1 for line in output[:3]]
    assert "96 tokens in" in output[-2]
    # Two of the first prompt's three blocks end before its last token: for the second prompt, and for its repetition.
    assert "64 of 140 prompt tokens came from the prefix cache" == output[-1]


def test_a_system_prompt_is_saved_in_one_process_and_loaded_in_another() -> None:
    lines = run("save_a_system_prompt.py").splitlines()
    assert "saved 2000 of 2000 tokens in" in lines[0]
    assert lines[1].startswith("loaded 2000 tokens in ")
    assert lines[1].endswith("; the question found 2000 of them")
    assert "the same token: True" == lines[3]


@pytest.mark.parametrize(
    ("name", "entry", "most_blocks"),
    [
        ("moba", "means", (16, 16)),
        ("native_sparse", "means", (16, 16)),
        # The blocks of compressed tokens are freed; a block of means holds the mean of 16 tokens.
        ("compressive_memory", "memory", (9, 8)),
        # Only the heads that read all tokens keep all blocks.
        ("duo_attention", "near", (16, 7)),
        ("snap_kv", "query", (16, 5)),
    ],
)
def test_a_type_that_defines_its_attention_equals_its_definition(
    monkeypatch: pytest.MonkeyPatch,
    run_here: Callable[[str], str],
    name: str,
    entry: str,
    most_blocks: tuple[int, int],
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "by_content"))
    lines = run_here(f"by_content/{name}.py").splitlines()
    layer = "model.layers.0.self_attn"
    held_lines = (
        f"{layer}: at most {most_blocks[0]} blocks held",
        f"{layer}/{entry}: at most {most_blocks[1]} blocks held",
    )
    assert [
        *held_lines,
        "prefix cache: 128 of 216 prompt tokens",
        "other tokens than full attention: True",
        "tokens equal to the dense definition: 3 of 3 requests",
    ] == lines[-5:]


def test_each_such_type_takes_few_lines() -> None:
    lengths = {path.stem: len(path.read_text().splitlines()) for path in (EXAMPLES / "by_content").glob("*.py")}
    assert 6 == len(lengths)
    assert 150 >= max(lengths.values())


def test_the_cache_manager_serves_a_batch_without_the_engine(run_here: Callable[[str], str]) -> None:
    lines = run_here("manage_a_cache.py").splitlines()
    # 443 tokens with the generated ones: 28 blocks, and the last five of the window of 64 tokens.
    assert "pages held at the end: {'a0': [28, 5], 'a1': [28, 5], 'a2': [28, 5]}" == lines[0]
    assert "tokens found: {'b0': 400, 'b1': 400, 'b2': 400}" == lines[3]
    assert "400 tokens are pinned, in 29 pages" == lines[4]
    assert "1200 of 2418 tokens were found" == lines[5]
    assert len((EXAMPLES / "manage_a_cache.py").read_text(encoding="utf-8").splitlines()) <= 60


def test_a_model_learns_from_the_samples_of_its_engine(run_here: Callable[[str], str]) -> None:
    rounds = [line.split() for line in run_here("policy_gradient.py").splitlines()]
    rewards, differences = [float(words[3]) for words in rounds], [float(words[-1]) for words in rounds]
    assert 20 == len(rounds)
    # Ten times the largest difference seen, 9.5e-7.
    assert max(differences) < 1e-5
    # A random model's reward is 0.5, give or take 0.02; the last one seen was 0.97.
    assert 0.45 < rewards[0] < 0.55
    assert rewards[-1] > 0.8


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    save_byte_model(folder)
    return folder


def test_pages_are_drawn_of_a_plan_a_choice_and_a_run(bytes_model: Path, tmp_path: Path) -> None:
    lines = run("draw_pages.py", str(bytes_model), str(tmp_path / "pages")).splitlines()
    pages = [tmp_path / "pages" / name for name in ("plan.html", "explain.html", "trace.html")]
    assert [str(page) for page in pages] == [line.partition(": ")[0] for line in lines]
    plan, explained, traced = (page.read_text(encoding="utf-8") for page in pages)
    assert [True] * 3 == ["slab" in plan, "torch_reference" in explained, '"req-2"' in traced]


def test_a_client_talks_to_a_server(bytes_model: Path) -> None:
    stream, *samples = run("talk_to_a_server.py", str(bytes_model)).splitlines()
    assert stream.startswith("a stream:  ")
    assert ["sample 0:", "sample 1:", "sample 2:"] == [line[:9] for line in samples[:3]]
    assert 3 == len({line[10:] for line in samples[:3]})
    # The likeliest tokens and the generated one, which is the likeliest.
    assert [2] * 4 == [line.partition("likeliest: ")[2].count(", ") + 1 for line in samples[3:]]


def test_texts_are_embedded_as_transformers_does(run_here: Callable[[str], str]) -> None:
    output = run_here("embed_texts.py").splitlines()
    assert output[5].endswith("tokens of 4 texts in 1 steps, 0 cache bytes")
    assert output[6].startswith("equal to transformers' embeddings to ")


def test_a_missing_model_is_one_sentence() -> None:
    process = run_program(str(EXAMPLES / "run_a_model.py"), "nowhere")
    assert (1, "error: there is no file or folder nowhere\n") == (process.returncode, process.stderr)


def test_a_new_attention_type_equals_its_dense_reference(run_here: Callable[[str], str]) -> None:
    output = run_here("new_attention_type.py")
    assert "torch_reference: tokens equal to the dense reference: 3 of 3 requests" in output
    assert "flex: tokens equal to the dense reference: 3 of 3 requests" in output


def test_the_new_attention_type_keeps_the_laws() -> None:
    spec = runpy.run_path(str(EXAMPLES / "new_attention_type.py"))["FixedPatternSpec"]
    check_spec(spec(block_size=4, num_kv_heads=1, head_size=8, stride=10, num_summary=3))


def test_a_hybrid_plan_holds_twice_the_requests_of_a_full_one(run_here: Callable[[str], str]) -> None:
    lines = run_here("plan_a_hybrid_model.py").splitlines()
    assert ["8,192", "34", "16"] == lines[-3].split()
    assert ["131,072", "5", "1"] == lines[-1].split()


@pytest.mark.parametrize("path", sorted((EXAMPLES / "layers").iterdir()), ids=lambda path: path.name)
def test_a_layer_file_makes_layers_of_registered_kinds(path: Path) -> None:
    description = read_layer_file(path)
    layers = make_layer_specs(description, load_plugins().registry, Stack(), "bfloat16")
    assert len(group_layers(layers).groups) in (1, 2, 3)


@pytest.mark.parametrize(
    ("name", "num_layers", "num_sharing"),
    [("gemma_3_27b.json", 62, 0), ("gpt_oss_20b.toml", 24, 0), ("shared_caches.toml", 16, 8)],
)
def test_a_layer_file_has_the_layers_of_its_model(name: str, num_layers: int, num_sharing: int) -> None:
    layers = read_layer_file(EXAMPLES / "layers" / name).layers
    assert (num_layers, num_sharing) == (len(layers), sum(layer.shares_with is not None for layer in layers))


@pytest.mark.parametrize("path", sorted((EXAMPLES / "stacks").iterdir()), ids=lambda path: path.name)
def test_a_stack_is_valid_and_names_registered_things(path: Path) -> None:
    stack = Stack.from_file(path)
    stack.check_names(load_plugins(stack.plugins).registry)
