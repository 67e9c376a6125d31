"""``kvframe generate`` shows one prompt's text on a terminal as it comes, and ends cleanly on Ctrl-C."""

from __future__ import annotations

import itertools
import json
import os
import pty
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner
from kvframe_engine.engine import Engine
from kvframe_engine.running.model_runner import TokenRunner
from kvframe_transformers.testing import save_tiny

from kvframe.cli import main
from tests.programs import start_program
from tests.support.commands import Terminal
from tests.support.models import save_byte_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models: ``text``, whose tokens are bytes, and ``ids``, which has no tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    save_byte_model(folder / "text")
    save_tiny(folder / "ids", "llama")
    return folder


@attrs.frozen
class Run:
    """A command's exit code, what it printed on the terminals, and what stdout had before each step of the engine."""

    code: int
    out: str
    err: str
    at_step: list[str]


def run(*arguments: object, interrupted_at: int | None = None) -> Run:
    """Run a command on terminals without colours; raise Ctrl-C in the step of a number."""
    at_step: list[str] = []
    advance = Engine._advance

    def noted(engine: Engine) -> None:
        if len(at_step) == interrupted_at:
            raise KeyboardInterrupt
        at_step.append(out.getvalue())
        advance(engine)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(Terminal()) as out, redirect_stderr(Terminal()) as err:
        patch.setattr(Engine, "_advance", noted)
        patch.setenv("NO_COLOR", "1")
        with pytest.raises(SystemExit) as ended:
            main.main(["generate", *map(str, arguments), "--memory", "1MiB"])
    return Run(int(ended.value.code or 0), out.getvalue(), err.getvalue(), at_step)


def in_a_pipe(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["generate", *map(str, arguments), "--memory", "1MiB"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_text_is_printed_before_the_next_step(folder: Path) -> None:
    done = run(folder / "text", "--prompt", "abc", "--max-new-tokens", 40, "--ignore-eos")
    assert (0, True) == (done.code, done.out.startswith("abc\n"))
    assert (40, "abc\n") == (len(done.at_step), done.at_step[0])
    # Some tokens end within a character, whose text comes with a later one.
    assert len(set(done.at_step)) > 20
    assert all(done.out.startswith(shown) for shown in done.at_step)
    assert "40 tokens in " in done.err


def test_what_is_streamed_is_what_a_pipe_gets(folder: Path) -> None:
    for arguments in (
        (folder / "text", "--prompt", "abc", "--max-new-tokens", 40),
        (folder / "text", "--prompt", "abc", "--temperature", 1, "--seed", 3),
    ):
        assert in_a_pipe(*arguments) == run(*arguments).out


def test_token_ids_are_streamed_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[[1, 2, 3]]")
    arguments = (folder / "ids", "--prompt-token-ids", tmp_path / "ids.json", "--max-new-tokens", 5, "--ignore-eos")
    expected = in_a_pipe(*arguments).split()
    done = run(*arguments)
    assert (0, expected) == (done.code, done.out.split())
    assert [3, 4, 5, 6, 7] == [len(shown.split()) for shown in done.at_step]


@pytest.mark.parametrize(
    "options", [("--prompt", "abc", "--prompt", "abd"), ("--prompt", "abc", "--n", "2"), ("--prompt", "abc", "--json")]
)
def test_several_prompts_or_samples_and_json_are_printed_at_the_end(options: tuple[str, ...], folder: Path) -> None:
    done = run(folder / "text", *options, "--max-new-tokens", 5)
    assert (0, {""}) == (done.code, set(done.at_step))
    assert len(done.out) > 20


def test_a_prompt_that_is_refused_is_a_mistake_of_the_caller(folder: Path) -> None:
    done = run(folder / "text", "--prompt", "")
    assert (2, "") == (done.code, done.out)
    assert 1 == done.err.count("the prompt is empty; give at least one token")


def test_a_text_without_a_tokenizer_is_one_sentence(folder: Path) -> None:
    done = run(folder / "ids", "--prompt", "abc")
    assert (2, 1) == (done.code, done.err.count("ids has no tokenizer; give token ids instead of text"))


@pytest.mark.parametrize("when", [0, 7])
def test_ctrl_c_ends_the_line_and_keeps_what_was_generated(when: int, folder: Path) -> None:
    arguments = (folder / "text", "--prompt", "abc", "--max-new-tokens", 40, "--ignore-eos")
    done = run(*arguments, interrupted_at=when)
    assert (130, True) == (done.code, done.err.endswith("kvframe: interrupted\n"))
    assert f"{when} tokens in " in done.err
    assert done.out.endswith("\n")
    assert in_a_pipe(*arguments).startswith(done.out[:-1])
    assert (when == 0) == (done.out == "abc\n\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_prints_what_was_generated_of_several_prompts(as_json: bool, folder: Path, tmp_path: Path) -> None:
    arguments = ["generate", str(folder / "text"), "--prompt", "abc", "--prompt", "abd", "--prompt", "", "--ignore-eos"]
    arguments += ["--memory", "1MiB", "--max-new-tokens", "40", *(["--json"] if as_json else [])]
    whole = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)["outputs"]
    advance, steps = Engine._advance, itertools.count()

    def noted(engine: Engine) -> None:
        if next(steps) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        advance(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_advance", noted)
        result = CliRunner().invoke(main, arguments)
    assert (130, True) == (result.exit_code, result.stderr.endswith("kvframe: interrupted\n"))
    assert 7 == next(steps)
    if not as_json:
        first, second, refused = result.stdout.strip().split("\n\n")
        assert (True, True) == (first.startswith("abc\n"), second.startswith("abd\n"))
        assert "refused: the prompt is empty; give at least one token" == refused.strip()
        assert len(first) > len("abc\n")
        return
    outputs = json.loads(result.stdout)["outputs"]
    assert ["aborted", "aborted", "refused"] == [each["finish_reason"] for each in outputs]
    for part, all_of_it in zip(outputs[:2], whole[:2], strict=True):
        assert all_of_it["token_ids"][:7] == part["token_ids"]
        assert all_of_it["text"].startswith(part["text"])


def test_a_second_ctrl_c_ends_several_prompts_at_once(folder: Path) -> None:
    def twice(runner: TokenRunner, step: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second one ends the step")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenRunner, "run", twice)
        result = CliRunner().invoke(main, ["generate", str(folder / "text"), "--prompt", "a", "--prompt", "b"])
    assert (130, "") == (result.exit_code, result.stdout)


def test_ctrl_c_on_a_terminal_stops_a_generation_that_is_shown(folder: Path) -> None:
    ours, theirs = pty.openpty()
    slow = "import time, kvframe_engine.engine as e; a = e.Engine._advance; "
    slow += "e.Engine._advance = lambda self: (time.sleep(0.05), a(self)); from kvframe.__main__ import run; run()"
    arguments = ["generate", str(folder / "ids"), "--prompt-token-ids", "-", "--max-new-tokens", "400", "--ignore-eos"]
    given, prompts = os.pipe()
    environment = os.environ | {"NO_COLOR": "1"}
    process = start_program(["-c", slow, *arguments], {0: given, 1: theirs, 2: theirs}, environment=environment)
    os.close(given)
    os.close(theirs)
    os.write(prompts, b"[[1, 2, 3]]")
    os.close(prompts)
    shown = b""
    while len(shown.partition(b"[1, 2, 3]")[2].split()) < 3:
        shown += os.read(ours, 4096)
    assert process.is_alive()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    try:
        while True:
            shown += os.read(ours, 4096)
    except OSError:  # Linux: the other side is closed
        pass
    process.join(60)
    os.close(ours)
    assert 130 == process.exitcode
    assert shown.endswith(b"kvframe: interrupted\r\n")
    assert b" tokens in " in shown
