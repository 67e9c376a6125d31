"""What a shell offers while a command is typed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvframe.loading.plugins import load_plugins


def offered(*words: str, shell: str = "bash") -> list[str]:
    """Return what a shell offers for the last of some words."""
    environment = {"_KVFRAME_COMPLETE": f"{shell}_complete", "COMP_WORDS": " ".join(words)}
    command = [sys.executable, "-c", "from kvframe.__main__ import run; import sys; sys.argv[0] = 'kvframe'; run()"]
    done = subprocess.run(
        command,
        env=os.environ | environment | {"COMP_CWORD": str(len(words) - 1)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "" == done.stderr
    return [line.removeprefix("plain,") for line in done.stdout.splitlines() if line]


def registered(kind: str) -> list[str]:
    return sorted({entry.name for entry in load_plugins().registry.catalogues[kind].claims()})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("kvframe", "pl"), ["plan", "plugins"]),
        (("kvframe", "plugins", "flash"), ["flash_attn", "flash_attn_3", "flashinfer", "flashinfer_mla"]),
        (("kvframe", "generate", "model", "--drafts", "none"), []),
        (("kvframe", "generate", "model", "--drafts", "n"), ["ngram"]),
        (("kvframe", "chat", "model", "--drafts", "n"), ["ngram"]),
        (("kvframe", "generate", "model", "--prefill-skipping", "d"), ["decode_only"]),
        (("kvframe", "generate", "model", "--dtype", "b"), ["bfloat16"]),
        (("kvframe", "doctor", "--j"), ["--json"]),
    ],
)
def test_a_begun_word_is_completed(words: tuple[str, ...], expected: list[str]) -> None:
    assert expected == offered(*words)


def test_all_wrappers_are_offered_with_the_distribution_of_each() -> None:
    assert registered("wrapper") == offered("kvframe", "generate", "model", "--prefill-skipping", "")
    shown = offered("kvframe", "generate", "model", "--prefill-skipping", "ch", shell="zsh")
    assert ["plain", "chunked_local", "kvframe-chunked-local"] == shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell: str) -> None:
    environment = os.environ | {"_KVFRAME_COMPLETE": f"{shell}_source"}
    command = [sys.executable, "-c", "from kvframe.__main__ import run; import sys; sys.argv[0] = 'kvframe'; run()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"_KVFRAME_COMPLETE={shell}_complete" in done.stdout
