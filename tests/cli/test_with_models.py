"""The command line on models on disk, from the prompt's text to the last token, in pipes and on terminals."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_transformers.testing import save_tiny
from transformers import DeepseekV3Config

from tests.programs import start_program
from tests.support.commands import run, run_json, write
from tests.support.models import save_tokenizer, trained_tokenizer

TEXT = "the cat sat on the mat and the dog sat on the cat"


@attrs.frozen
class Models:
    """Checkpoints in one folder, and the models that were saved there.

    ``hybrid`` has three windowed layers and a full one; ``text`` has a tokenizer; ``huge`` has only a config.
    """

    folder: Path
    hybrid: Any
    text: Any
    tokenizer: Any


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    tokenizer = trained_tokenizer([TEXT], 280)
    save_tokenizer(folder / "text", tokenizer)
    DeepseekV3Config().save_pretrained(folder / "huge")
    return Models(
        folder=folder,
        hybrid=save_tiny(folder / "hybrid", "gemma3_text"),
        text=save_tiny(folder / "text", "llama", vocab_size=tokenizer.get_vocab_size()),
        tokenizer=tokenizer,
    )


@pytest.fixture
def here(saved: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the models and ``ids.json``: two prompts of token ids."""
    for model in saved.folder.iterdir():
        (tmp_path / model.name).symlink_to(model)
    write(tmp_path / "ids.json", [[5, 6, 7], list(range(20, 60))])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def generate(model: str, *options: str) -> Any:
    return run_json("generate", model, "--prompt-token-ids", "ids.json", *options)


def tokens(found: Any) -> list[list[int]]:
    return [output["token_ids"] for output in found["outputs"]]


def expected_tokens(model: Any, prompt: list[int], num_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new_tokens, do_sample=False)
    return list(out[0, len(prompt) :].tolist())


# --- generate ---------------------------------------------------------------------------------------------------------


def test_token_ids_go_on_as_transformers_goes_on(here: Path, saved: Models) -> None:
    expected = [expected_tokens(saved.hybrid, prompt, 12) for prompt in ([5, 6, 7], list(range(20, 60)))]
    assert expected == tokens(generate("hybrid", "--max-new-tokens", "12"))


def test_text_goes_on_as_transformers_goes_on(here: Path, saved: Models) -> None:
    texts = ("the cat sat on", "dog")
    found = run_json("generate", "text", "--prompt", texts[0], "--prompt", texts[1], "--max-new-tokens", "5")
    prompts = [saved.tokenizer.encode(text).ids for text in texts]
    expected = [expected_tokens(saved.text, prompt, 5) for prompt in prompts]
    assert prompts == [output["prompt_token_ids"] for output in found["outputs"]]
    assert expected == tokens(found)
    assert [saved.tokenizer.decode(each) for each in expected] == [output["text"] for output in found["outputs"]]


def test_a_file_of_prompts_is_one_a_line(here: Path) -> None:
    file = write(here / "prompts.txt", "the cat\n\nthe mat\n")
    by_file = run_json("generate", "text", "--prompts", file, "--max-new-tokens", "3")
    by_option = run_json("generate", "text", "--prompt", "the cat", "--prompt", "the mat", "--max-new-tokens", "3")
    assert by_option["outputs"] == by_file["outputs"]


def test_json_is_one_object_with_outputs_and_stats(here: Path) -> None:
    result = run("generate", "hybrid", "--prompt-token-ids", "ids.json", "--max-new-tokens", "1", "--json")
    found = json.loads(result.stdout)
    assert 1 == result.stdout.count("\n")
    assert {"outputs", "stats"} == set(found)
    assert {"prompt_token_ids", "token_ids", "text"} <= set(found["outputs"][0])
    of_prompt = {"num_tokens", "known_tokens", "of_groups", "limited_by", "why", "restored_tokens", "restored_from"}
    assert of_prompt == set(found["outputs"][0]["cached"])


def test_a_temperature_samples_and_zero_does_not(here: Path) -> None:
    greedy = tokens(generate("hybrid", "--max-new-tokens", "8"))
    assert greedy == tokens(generate("hybrid", "--max-new-tokens", "8", "--temperature", "0", "--seed", "1"))
    assert greedy != tokens(generate("hybrid", "--max-new-tokens", "8", "--temperature", "50", "--seed", "1"))


def test_the_dtype_is_the_caches_too(here: Path) -> None:
    single, half = (
        generate("text", "--max-new-tokens", "1", "--dtype", dtype)["stats"]["cache_bytes"]
        for dtype in ("float32", "bfloat16")
    )
    assert single == 2 * half


def test_memory_comes_from_the_stack_unless_it_is_given(here: Path) -> None:
    stack = write(here / "stack.toml", '[cache]\nmemory = "120KiB"\n')
    by_stack = generate("text", "--max-new-tokens", "1", "--stack", stack)
    given = generate("text", "--max-new-tokens", "1", "--stack", stack, "--memory", "240KiB")
    assert (120 * 1024, 240 * 1024) == (by_stack["stats"]["cache_bytes"], given["stats"]["cache_bytes"])


def test_refused_prompts_keep_their_places(here: Path) -> None:
    write(here / "ids.json", [[1, 2], [], [1, 999], [7] * 600, [8] * 300, [3, 4]])
    arguments = ("--prompt-token-ids", "ids.json", "--max-new-tokens", "3", "--memory", "60KiB")
    result = run("generate", "text", *arguments, "--json")
    outputs = json.loads(result.stdout)["outputs"]
    assert 1 == result.exit_code
    assert [3, 0, 0, 0, 0, 3] == [len(output["token_ids"]) for output in outputs]
    assert [2, 0, 2, 600, 300, 2] == [len(output["prompt_token_ids"]) for output in outputs]
    says = ("prompt is empty", "999 is not a token id", "has 600 tokens, but a request has at most 512", "more memory")
    assert [True] * 4 == [part in output["error"] for part, output in zip(says, outputs[1:5], strict=True)]


def test_text_shows_each_prompt_and_its_result(here: Path) -> None:
    result = run("generate", "text", "--prompt", "the cat", "--prompt", "", "--max-new-tokens", "2")
    assert 1 == result.exit_code
    assert result.stdout.startswith("the cat\n")
    assert result.stdout.endswith("\n\n\nrefused: the prompt is empty; give at least one token\n\n")


# --- plan -------------------------------------------------------------------------------------------------------------


def test_plan_counts_every_byte_of_a_page(here: Path) -> None:
    window, full = run_json("plan", "hybrid", "--cache-memory", "1MiB")["groups"]
    # Layers, tokens of a block, keys and values, heads, head size, bytes of a float32.
    assert 3 * 16 * 2 * 2 * 16 * 4 == window["page_bytes"]
    assert 1 * 16 * 2 * 2 * 16 * 4 == full["page_bytes"]


def test_plan_has_the_keys_of_its_contract(here: Path) -> None:
    found = run_json("plan", "hybrid")
    assert {"groups", "slab_bytes", "num_slabs", "waste_fraction", "max_concurrency"} <= set(found)
    assert {"spec", "layers", "block_size", "page_bytes"} <= set(found["groups"][0])


def test_memory_left_to_kvframe_holds_the_most_requests_of_the_greatest_length(here: Path) -> None:
    stack = write(here / "stack.toml", "[limits]\nmax_num_seqs = 3\n")
    assert 3 == run_json("plan", "text", "--stack", stack)["max_concurrency"]
    assert 3 == run_json("plan", "text", "--stack", stack, "--cache-memory", "auto")["max_concurrency"]


@pytest.mark.parametrize("model", ["huge", "huge/config.json"])
def test_a_published_giant_is_planned_from_its_config_alone(here: Path, model: str) -> None:
    assert ["config.json"] == os.listdir("huge")
    (group,) = run_json("plan", model, "--cache-memory", "64GiB", "--dtype", "bfloat16")["groups"]
    # For each token, a latent vector of 512 and the shared rotated part of the keys, 64.
    assert 61 * 16 * (512 + 64) * 2 == group["page_bytes"]


# --- mistakes ---------------------------------------------------------------------------------------------------------


def truncated_weights(here: Path) -> None:
    shutil.copytree(here / "text", here / "model")
    weights = here / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20_000])


def config(text: str) -> Callable[[Path], None]:
    def prepare(here: Path) -> None:
        (here / "model").mkdir()
        write(here / "model" / "config.json", text)

    return prepare


def stack(text: str) -> Callable[[Path], None]:
    def prepare(here: Path) -> None:
        write(here / "stack.toml", text)

    return prepare


def full_attention(**options: object) -> Callable[[Path], None]:
    def prepare(here: Path) -> None:
        layer = {"name": "a", "kind": "full_attention", **options}
        write(here / "layers.json", {"max_model_len": 64, "layers": [layer]})

    return prepare


def nothing(here: Path) -> None:
    pass


def generating(model: str, *options: str) -> tuple[str, ...]:
    return ("generate", model, "--prompt-token-ids", "ids.json", *options)


BY_STACK = generating("hybrid", "--stack", "stack.toml")


@pytest.mark.parametrize(
    ("prepare", "arguments", "says"),
    [
        (config('{"hello": 1}'), generating("model"), "model is no model that a plugin recognises (asked: transfo"),
        (config('{"model_type":\n'), generating("model"), "model/config.json is not valid JSON: Expecting value: line"),
        (config('{"model_type":\n'), ("plan", "model"), "model/config.json is not valid JSON: Expecting value: line"),
        (config('{"model_type": "none"}'), ("plan", "model"), "names the architecture 'none', which transformers"),
        (
            config('{"model_type": "vit"}'),
            ("plan", "model"),
            "model has the architecture 'vit', for which transformers",
        ),
        (truncated_weights, generating("model"), "the weights of model cannot be loaded: SafetensorError"),
        (nothing, generating("huge"), "the weights of huge cannot be loaded: OSError"),
        (nothing, generating("huge/config.json"), "huge/config.json is a config without weights"),
        (nothing, ("generate", "text", "--prompts", "no.txt"), "no.txt cannot be read: No such file"),
        (nothing, generating("hybrid", "--device", "abacus"), "'abacus' cannot be used: Expected one of cpu, cuda"),
        (nothing, generating("hybrid", "--memory", "2GB2"), "--memory must be 'auto', a number of bytes, or a size"),
        (stack("[cache]\nblocksize = 3\n"), BY_STACK, "stack.toml: cache.blocksize: there is no key named"),
        (stack('[cache]\nblock_size = "3"\n'), BY_STACK, "stack.toml: cache.block_size must be a whole number"),
        (stack('[[rules]]\nlayers = "*"\nbackend = "torhc"\n'), BY_STACK, "rules[0].backend: there is no backend"),
        (
            stack('[plugins]\ndisabled = ["sliding_window"]\n'),
            BY_STACK,
            "layer 'model.layers.0.self_attn' needs the cache spec 'sliding_window', which no plugin provides",
        ),
        (
            stack('[[rules]]\nkind = "sliding_window"\nspec = {window = 0}\n'),
            BY_STACK,
            "layer 'model.layers.0.self_attn' (sliding_window): SlidingWindowSpec.window must be a whole number",
        ),
        (
            full_attention(num_kv_heads=2),
            ("plan", "layers.json"),
            "layer 'a': the cache spec 'full_attention' needs head_size",
        ),
        (
            full_attention(num_kv_heads=2, head_size=4, window=3),
            ("plan", "layers.json"),
            "layer 'a': the cache spec 'full_attention': there is no option named 'window'; known: block_size, dtype, ",
        ),
        (
            full_attention(num_kv_heads=True, head_size=4),
            ("plan", "layers.json"),
            "layer 'a' (full_attention): QuerySpec.num_heads must be a whole number of at least 1, not True",
        ),
    ],
)
def test_a_mistake_is_one_line(
    here: Path, prepare: Callable[[Path], None], arguments: tuple[str, ...], says: str
) -> None:
    prepare(here)
    result = run(*arguments)
    assert (2, "", 1) == (result.exit_code, result.stdout, result.stderr.count("\n"))
    assert result.stderr.startswith("kvframe: error: ")
    assert says in result.stderr


def test_a_mistake_leaves_no_traceback(here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvframe", "plan", "nowhere"], capture_output=True, text=True, check=False
    )
    assert 2 == done.returncode
    assert ("", "kvframe: error: there is no file or folder nowhere\n") == (done.stdout, done.stderr)


# --- on a terminal ----------------------------------------------------------------------------------------------------


def run_on_terminal(*arguments: str) -> str:
    """Run the command with a terminal as its output and error; return the text on the terminal."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "160", "OMP_NUM_THREADS": "1"}
    files = dict.fromkeys(range(3), theirs)
    process = start_program(["-m", "kvframe", *arguments], files, cwd=Path.cwd(), environment=environment)
    os.close(theirs)
    written = b"".join(iter(lambda: read_terminal(ours), b""))
    process.join()
    os.close(ours)
    assert 0 == process.exitcode, written.decode()
    return written.decode()


def read_terminal(descriptor: int) -> bytes:
    """Return the next output; nothing at the end."""
    try:
        return os.read(descriptor, 4096)
    except OSError as error:
        # On Linux, this error means that the other side is closed.
        if error.errno != errno.EIO:
            raise
        return b""


def test_prefixes_that_one_run_saved_are_found_by_the_next(here: Path) -> None:
    small = ("--block-size", "2", "--max-new-tokens", "3")
    plain = generate("hybrid", *small)
    first = generate("hybrid", *small, "--save-prefixes", "prefixes")
    second = generate("hybrid", *small, "--load-prefixes", "prefixes")
    assert tokens(plain) == tokens(first) == tokens(second)
    assert first["saved_prefixes"] == second["loaded_prefixes"]
    lengths = [each["num_tokens"] for each in first["saved_prefixes"]]
    assert all(length > 0 and length % 2 == 0 for length in lengths)
    assert second["stats"]["cached_prompt_tokens"] > plain["stats"]["cached_prompt_tokens"]
    shown = run("generate", "hybrid", "--prompt-token-ids", "ids.json", *small, "--load-prefixes", "prefixes").stderr
    assert f"loaded {len(lengths)} of {len(lengths)} prefixes, {sum(lengths)} tokens: prefixes" in shown
    refused = run("generate", "hybrid", "--prompt-token-ids", "ids.json", "--load-prefixes", "prefixes")
    assert (2, 1) == (refused.exit_code, refused.stderr.count("prefixes was saved from a cache with other pages"))


def test_a_file_without_prefixes_is_refused_before_the_model_is_loaded(here: Path) -> None:
    Path("other").write_bytes(b"{}")
    for file, reason in (("missing", "there is no file missing"), ("other", "other is damaged")):
        refused = run("generate", "hybrid", "--prompt-token-ids", "ids.json", "--load-prefixes", file)
        assert 2 == refused.exit_code
        (line,) = refused.stderr.splitlines()
        assert reason in line


def test_generate_shows_progress_and_colours_on_a_terminal(here: Path) -> None:
    shown = run_on_terminal(*generating("hybrid", "--max-new-tokens", "8"))
    assert re.search(r"generating.*[012]/2", shown)
    assert "\x1b[1m[5, 6, 7]\x1b[0m" in shown
    assert re.search(r"16 tokens in \d+\.\d\d s; 0% of the prompts' tokens were cached", shown)


def test_plan_draws_coloured_tables_on_a_terminal(here: Path) -> None:
    layer = {"name": "a", "kind": "full_attention", "num_kv_heads": 2, "head_size": 16}
    layers = write(here / "layers.json", {"max_model_len": 1024, "layers": [layer]})
    shown = run_on_terminal("plan", layers, "--cache-memory", "16MiB")
    assert "\x1b[" in shown
    assert "───" in shown
