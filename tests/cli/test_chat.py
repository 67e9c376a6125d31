"""``kvframe chat``: the template, the turns, the cache that stays warm, and how it ends."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner, Result
from kvframe_engine.commands.chat import _HELP
from kvframe_transformers.testing import save_tiny
from transformers import AutoTokenizer

from kvframe import Engine, SamplingParams, Stack
from kvframe.cli import main
from kvframe.contract.model import LoadedModel
from tests.programs import start_program
from tests.support.commands import Terminal, without_start
from tests.support.models import save_byte_model

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system comes first') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models: ``chat``, whose tokens are bytes, ``base`` without a chat template, ``ids`` without a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "ids", "llama")
    for name, template in (("base", None), ("chat", TEMPLATE), ("broken", "{{ raise_exception('no luck') }}")):
        save_byte_model(folder / name, chat_template=template)
    return folder


def run(model: Path, typed: str | bytes, *options: object) -> Result:
    arguments = ["chat", str(model), "--memory", "2MiB", "--max-new-tokens", "6", *map(str, options)]
    return CliRunner().invoke(main, arguments, input=typed)


def answers(model: Path, *texts: str, system: str | None = None) -> list[str]:
    """Return what the engine answers to messages, the prompt of each written out by hand."""
    prompt = "" if system is None else f"[system]{system}\n"
    found = []
    with Engine.from_pretrained(model, stack=Stack.from_mapping({"cache": {"memory": "2MiB"}})) as engine:
        for text in texts:
            prompt += f"[user]{text}\n[assistant]"
            (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=6))
            found.append(output.text)
            prompt += f"{output.text}\n"
    return found


def test_each_line_is_answered_in_the_template_of_the_checkpoint(folder: Path) -> None:
    result = run(folder / "chat", "hello\nand you?\n")
    assert (0, "") == (result.exit_code, without_start(result.stderr))
    assert "".join(f"{each}\n" for each in answers(folder / "chat", "hello", "and you?")) == result.stdout


def test_a_system_message_is_told_first(folder: Path) -> None:
    result = run(folder / "chat", "hello\n", "--system", "be kind")
    assert f"{answers(folder / 'chat', 'hello', system='be kind')[0]}\n" == result.stdout
    assert result.stdout != run(folder / "chat", "hello\n").stdout


def test_reset_starts_again_after_the_system_message(folder: Path) -> None:
    for system in ((), ("--system", "be kind")):
        whole = run(folder / "chat", "hello\n/reset\nhello\n", *system).stdout
        assert run(folder / "chat", "hello\n", *system).stdout * 2 == whole


def test_empty_lines_are_ignored_and_a_last_line_needs_no_end(folder: Path) -> None:
    assert run(folder / "chat", "hello\n").stdout == run(folder / "chat", "\n  \nhello").stdout


@pytest.mark.parametrize("end", ["exit", "/exit", "quit", "/quit"])
def test_a_line_ends_the_chat(end: str, folder: Path) -> None:
    result = run(folder / "chat", f"hello\n{end}\nhello\n")
    assert (0, run(folder / "chat", "hello\n").stdout) == (result.exit_code, result.stdout)


def test_an_unknown_command_does_not_go_to_the_model(folder: Path) -> None:
    result = run(folder / "chat", "/rest\n/save a file\n/\nhello\n/help\n")
    assert run(folder / "chat", "hello\n").stdout == result.stdout
    expected = [*(f"kvframe: there is no command {name}: {_HELP}" for name in ("/rest", "/save", "/")), _HELP]
    assert expected == without_start(result.stderr).splitlines()


def test_a_path_is_a_message(folder: Path) -> None:
    result = run(folder / "chat", "/etc/hosts\n")
    assert f"{answers(folder / 'chat', '/etc/hosts')[0]}\n" == result.stdout


def test_a_line_that_is_no_text_is_left_out(folder: Path) -> None:
    result = run(folder / "chat", b"\xff\xfe\nhello\n")
    assert run(folder / "chat", "hello\n").stdout == result.stdout
    assert "kvframe: a line that is not UTF-8 text was left out\n" == without_start(result.stderr)


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("base", (), "base has no chat template; `kvframe generate` continues a text"),
        ("ids", (), "ids has no tokenizer; give token ids instead of text"),
        ("broken", (), "the chat template of broken failed: TemplateError: no luck"),
        ("none", (), "there is no file or folder none"),
        ("chat", ("--drafts", "guess"), "there is no proposer named 'guess'"),
    ],
)
def test_a_model_that_cannot_chat_is_one_sentence(
    model: str, options: tuple[str, ...], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    result = run(Path(model), "hello\n", *options)
    assert (2, "", 1) == (result.exit_code, result.stdout, len(without_start(result.stderr).splitlines()))
    assert says in result.stderr


def test_a_message_that_cannot_be_answered_is_not_kept(folder: Path) -> None:
    result = run(folder / "chat", f"hello\n{'x' * 600}\nand you?\n")
    assert 0 == result.exit_code
    assert "".join(f"{each}\n" for each in answers(folder / "chat", "hello", "and you?")) == result.stdout
    assert without_start(result.stderr).startswith("kvframe: the prompt has 6")
    assert result.stderr.endswith("; /reset starts a new conversation\n")


def test_several_ranks_cannot_share_a_chat(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    result = run(folder / "chat", "hello\n")
    assert (2, True) == (result.exit_code, "which several ranks share: start it in one process" in result.stderr)


def test_a_model_without_a_template_of_its_own_is_refused_by_the_contract() -> None:
    with pytest.raises(Exception, match="paper has no chat template"):
        LoadedModel.encode_chat(attrs.make_class("Model", {"description": attrs.field()})(_Described()), [])  # type: ignore[arg-type]


class _Described:
    name = "paper"


# --- on a terminal ----------------------------------------------------------------------------------------------------


class Typed(io.TextIOWrapper):
    """Standard input that says that it is a terminal."""

    def __init__(self, text: str) -> None:
        super().__init__(io.BytesIO(text.encode()), encoding="utf-8")

    def isatty(self) -> bool:
        return True


def on_terminal(
    model: Path, typed: str, monkeypatch: pytest.MonkeyPatch, interrupted_at: int | None = None
) -> tuple[int, str, str]:
    """Chat on terminals, with Ctrl-C in the engine's step of a number; return exit code, output and error."""
    num_steps = 0
    advance = Engine._advance

    def step(engine: Engine) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == interrupted_at:
            raise KeyboardInterrupt
        advance(engine)

    monkeypatch.setattr(Engine, "_advance", step)
    monkeypatch.setattr(sys, "stdin", Typed(typed))
    monkeypatch.setenv("NO_COLOR", "1")
    with redirect_stdout(Terminal()) as out, redirect_stderr(Terminal()) as err, pytest.raises(SystemExit) as ended:
        main.main(["chat", str(model), "--memory", "2MiB", "--max-new-tokens", "6", "--block-size", "4"])
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


def test_a_terminal_is_asked_for_each_line_and_shows_what_was_cached(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = on_terminal(folder / "chat", "hello\nand you?\n", monkeypatch)
    first, second = answers(folder / "chat", "hello", "and you?")
    assert (0, f"{first}\n{second}\n", 3) == (code, out, err.count("> "))
    assert "/reset starts again, /exit or Ctrl-D ends the chat, Ctrl-C ends an answer\n> " in err
    hits = re.findall(r"6 tokens in \d+\.\d\d s; (\d+) of (\d+) tokens before them were cached\n", err)
    before = len("[user]hello\n[assistant]")
    assert ("0", str(before)) == hits[0]
    # What the first turn computed is found again: all of it but the last token, which is not stored yet, in whole
    # blocks of 4 unless the answer's bytes are not text and come back as other tokens.
    assert before // 4 * 4 <= int(hits[1][0]) <= before + 5
    assert int(hits[1][1]) > int(hits[1][0])


def test_ctrl_c_ends_an_answer_and_the_conversation_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = on_terminal(folder / "chat", "hello\nand you?\n", monkeypatch, interrupted_at=4)
    whole, *_ = answers(folder / "chat", "hello")
    cut, second, *rest = out.split("\n")
    assert (0, [""]) == (code, rest)
    assert whole.startswith(cut)
    assert len(cut) < len(whole)
    prompt = f"[user]hello\n[assistant]{cut}\n[user]and you?\n[assistant]"
    with Engine.from_pretrained(folder / "chat", stack=Stack.from_mapping({"cache": {"memory": "2MiB"}})) as engine:
        assert engine.generate([prompt], SamplingParams(max_new_tokens=6))[0].text == second


def test_ctrl_c_while_typing_and_the_end_of_input_end_the_chat(folder: Path) -> None:
    for key, code in ((b"\x03", 130), (b"\x04", 0)):
        ours, theirs = pty.openpty()
        command = ["-c", _ON_TERMINAL, "chat", str(folder / "chat"), "--max-new-tokens", "3"]
        environment = os.environ | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        process = start_program(command, dict.fromkeys(range(3), theirs), environment=environment)
        os.close(theirs)
        shown = _read_until(ours, "\n> ")
        os.write(ours, b"hello\n")
        shown += _read_until(ours, "were cached\r\n> ")
        os.write(ours, b"\x1b[A")  # the line before, which is edited
        shown += _read_until(ours, "hello")
        os.write(ours, b"\x7f" * 5 + b"/hell\x02\x1b[3~\n")  # Ctrl-B is a step back; what it is on is deleted
        shown += _read_until(ours, "there is no command /hel: " + _HELP + "\r\n> ")
        os.write(ours, key)
        while not select.select([ours], [], [], 2)[0]:
            os.write(ours, key)  # Python loses a Ctrl-C that comes between its prompt and its wait for keys
        shown += _read_until(ours, None)
        process.join(60)
        os.close(ours)
        assert code == process.exitcode, shown
        assert (code == 130) == shown.endswith("kvframe: interrupted\r\n")


# A terminal sends Ctrl-C to the processes that it controls.
_ON_TERMINAL = """
import fcntl, os, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from kvframe.__main__ import run
run()
"""


def _read_until(descriptor: int, text: str | None) -> str:
    """Read a terminal until it shows a text, or until it is closed."""
    shown = b""
    while text is None or not shown.decode(errors="replace").endswith(text):
        assert select.select([descriptor], [], [], 60)[0], shown
        try:
            part = os.read(descriptor, 4096)
        except OSError:  # Linux: the other side is closed
            part = b""
        if not part:
            assert text is None, shown
            break
        shown += part
    return shown.decode(errors="replace")


# --- the adapter ------------------------------------------------------------------------------------------------------


def test_the_adapter_applies_the_template_with_the_start_of_the_answer(folder: Path) -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "so"},
    ]
    expected = AutoTokenizer.from_pretrained(folder / "chat").encode(
        "[user]hello\n[assistant]hi\n[user]so\n[assistant]"
    )
    with Engine.from_pretrained(folder / "chat", stack=Stack.from_mapping({"cache": {"memory": "2MiB"}})) as engine:
        assert expected == engine.model.encode_chat(messages)
