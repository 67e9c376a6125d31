"""Ids of repositories: what is downloaded for which command, and what is said without a connection."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.testing import save_tiny

from kvframe import find_model
from tests.programs import run_program
from tests.support.commands import run, without_start

REPOSITORY = "acme/tiny-llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny(folder, "llama")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, without models."""
    (tmp_path / "ids.json").write_text("[[1, 2, 3]]")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cached(cache: Path, checkpoint: Path, *names: str) -> Path:
    """Put files of a checkpoint into a cache as huggingface_hub stores them; return their folder."""
    repository = cache / "models--acme--tiny-llama"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for file in checkpoint.iterdir():
        if not names or file.name in names:
            shutil.copy(file, repository / "blobs" / file.name)
            (folder / file.name).symlink_to(Path("../../blobs") / file.name)
    return folder


READ_THE_ENVIRONMENT = """
import importlib, huggingface_hub.constants
importlib.reload(huggingface_hub.constants)
from kvframe.__main__ import run
run()
"""
"""The process has imported the library before its environment said where the cache is."""


def run_offline(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, with a cache and without a connection."""
    environment = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return run_program("-c", READ_THE_ENVIRONMENT, *arguments, cwd=Path.cwd(), environment=environment)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, here: Path) -> list[dict[str, Any]]:
    """The arguments of each download, in place of a connection; the checkpoint comes back."""
    asked: list[dict[str, Any]] = []

    def download(repository: str, **options: Any) -> str:
        asked.append({"repository": repository, **options})
        return str(cached(here / "cache", checkpoint) if len(asked) == 1 else here / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


GENERATE = ("generate", REPOSITORY, "--prompt-token-ids", "ids.json", "--max-new-tokens", "2", "--memory", "1MiB")


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_a_plan_downloads_the_config_only(command: str, downloads: list[dict[str, Any]]) -> None:
    found = json.loads(run(command, REPOSITORY, "--json").stdout)
    (asked,) = downloads
    files = ["config.json", "generation_config.json", "model.safetensors.index.json"]
    assert (REPOSITORY, files) == (asked["repository"], asked["allow_patterns"])
    assert asked["revision"] is None
    assert "tiny-llama" == found["model"]


def test_a_run_downloads_weights_and_tokenizer_and_nothing_pickled(downloads: list[dict[str, Any]]) -> None:
    result = run(*GENERATE)
    assert 0 == result.exit_code, result.output
    (asked,) = downloads
    assert {"*.safetensors", "*.json", "*.model"} <= set(asked["allow_patterns"])
    assert not any("bin" in pattern or "pt" in pattern or pattern == "*" for pattern in asked["allow_patterns"])
    assert ["*/*.safetensors", "consolidated*"] == asked["ignore_patterns"]


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/3", COMMIT])
def test_a_revision_may_follow_the_id(revision: str, downloads: list[dict[str, Any]]) -> None:
    assert 0 == run("plan", f"{REPOSITORY}@{revision}").exit_code
    (asked,) = downloads
    assert (REPOSITORY, revision) == (asked["repository"], asked["revision"])


def test_a_folder_of_that_name_is_used_and_nothing_is_downloaded(
    here: Path, checkpoint: Path, downloads: list[dict[str, Any]]
) -> None:
    (here / "acme").mkdir()
    (here / REPOSITORY).symlink_to(checkpoint)
    assert 0 == run("plan", REPOSITORY).exit_code
    assert [] == downloads


@pytest.mark.parametrize(
    "name",
    [
        "nowhere",
        "/acme/tiny",
        "acme/tiny/config.json",
        "acme/../tiny",
        "a b/c",
        "acme/tiny@",
        "acme/tiny@-x",
        "acme@main",
    ],
)
def test_what_is_no_id_is_a_path(name: str, downloads: list[dict[str, Any]]) -> None:
    for arguments in (("plan", name), ("generate", name, "--prompt", "a")):
        result = run(*arguments)
        assert (2, 1) == (result.exit_code, len(result.stderr.splitlines()))
        assert "there is no file or folder" in result.stderr
    assert [] == downloads


# --- a cache, and no connection ---------------------------------------------------------------------------------------


def test_a_prepared_cache_is_enough_offline(here: Path, checkpoint: Path) -> None:
    cached(here / "cache", checkpoint)
    done = run_offline(here / "cache", *GENERATE, "--json")
    assert (0, "") == (done.returncode, without_start(done.stderr))
    assert 2 == len(json.loads(done.stdout)["outputs"][0]["token_ids"])
    planned = run_offline(here / "cache", "plan", REPOSITORY)
    assert (0, "") == (planned.returncode, planned.stderr)
    assert planned.stdout.startswith("tiny-llama: ")


def test_a_cache_with_the_config_is_enough_for_a_plan_and_says_what_a_run_needs(here: Path, checkpoint: Path) -> None:
    cached(here / "cache", checkpoint, "config.json")
    assert 0 == run_offline(here / "cache", "plan", REPOSITORY).returncode
    done = run_offline(here / "cache", *GENERATE)
    assert (2, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines()))
    assert (
        f"the cache {here}/cache lacks it: `hf download acme/tiny-llama` with a connection puts there what "
        "this command needs offline\n"
    ) in done.stderr


@pytest.mark.parametrize(
    ("arguments", "files"),
    [(("plan", REPOSITORY), " config.json"), (("explain", REPOSITORY), " config.json"), (GENERATE, "")],
)
def test_an_empty_cache_says_in_one_sentence_what_is_needed(arguments: tuple[str, ...], files: str, here: Path) -> None:
    done = run_offline(here / "cache", *arguments)
    assert (2, "") == (done.returncode, done.stdout)
    assert (
        "kvframe: error: there is no file or folder acme/tiny-llama; HF_HUB_OFFLINE is set, and the cache "
        f"{here}/cache lacks it: `hf download acme/tiny-llama{files}` with a connection puts there what this command "
        "needs offline\n"
    ) == done.stderr


def response(code: int) -> Any:
    import httpx2

    return httpx2.Response(code, request=httpx2.Request("GET", "https://huggingface.co"))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            lambda: errors.LocalEntryNotFoundError("Got: ConnectError\nmore"),
            "the Hugging Face Hub cannot be reached, and",
        ),
        (
            lambda: errors.GatedRepoError("401", response=response(401)),
            "the repository acme/tiny-llama is gated: ask for access at https://huggingface.co/acme/tiny-llama, ",
        ),
        (
            lambda: errors.RepositoryNotFoundError("404", response=response(404)),
            "; there is no repository of that id on the Hugging Face Hub that you may read",
        ),
        (
            lambda: errors.RevisionNotFoundError("404", response=response(404)),
            "the repository acme/tiny-llama has no branch, tag or commit v9\n",
        ),
        (lambda: OSError(28, "No space left on device"), "cannot be downloaded: OSError: [Errno 28] No space left on"),
    ],
)
def test_a_failed_download_is_one_sentence(
    error: Callable[[], Exception], says: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(repository: str, **options: Any) -> str:
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    result = run("plan", f"{REPOSITORY}@v9")
    assert (2, 1) == (result.exit_code, len(result.stderr.splitlines()))
    assert says in result.stderr


def test_without_a_model_adapter_the_sentence_says_what_installs_one(here: Path) -> None:
    (here / "stack.toml").write_text('[plugins]\ndisabled = ["transformers"]\n')
    result = run("plan", REPOSITORY, "--stack", "stack.toml")
    assert (2, True) == (result.exit_code, result.stderr.endswith("plugins/transformers\n"))


def test_what_an_adapter_says_wrongly_is_one_sentence(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformersAdapter, "find", lambda *_, weights: "a folder")
    result = run("plan", REPOSITORY)
    assert "model adapter 'kvframe-transformers:transformers': find() must return a Path or None" in result.stderr
    assert 1 == len(result.stderr.splitlines())


def test_a_path_that_is_none_is_one_sentence() -> None:
    assert "cannot be read: File name too long" in run("generate", "a" * 5000, "--prompt", "a").stderr
    assert find_model(Path(__file__), weights=True) == Path(__file__)
