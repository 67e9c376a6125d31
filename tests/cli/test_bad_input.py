"""Bad input on the command line: one sentence on stderr, exit code 2, and no file is changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvframe import Engine
from kvframe.cli import guard, render
from kvframe.contract.errors import FileError, ModelError, UnknownNameError, listed, shorten, shown
from kvframe.contract.files import parse_json, parse_toml, read_bytes, read_json, read_toml
from tests.cli.test_commands import error_of, run

ROOT = Path(__file__).parents[2]
LAYERS = ROOT / "examples" / "layers" / "llama_3_1_8b.toml"
DEEP = 100_000
BUG = "Traceback"


def run_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a separate process."""
    command = [sys.executable, "-m", "kvframe", *map(str, arguments)]
    return subprocess.run(command, **{"stderr": subprocess.PIPE, "check": False, "timeout": 240, **options})


def sentence_of(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the one line on stderr after a user's mistake."""
    assert 2 == done.returncode, done.stderr
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("kvframe: error: ")
    return line.removeprefix("kvframe: error: ")


# --- files ------------------------------------------------------------------------------------------------------------


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


UNREADABLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda path: None, "No such file or directory"),
    "folder": (lambda path: path.mkdir(), "Is a directory"),
    "circle": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "holds more than"),
    "huge": (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40), "holds more than"),
    "bytes": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "not UTF-8 text: invalid start byte at byte 0"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_file_that_cannot_be_read_is_one_sentence(kind: str, suffix: str, tmp_path: Path) -> None:
    make, reason = UNREADABLE[kind]
    path = tmp_path / f"file{suffix}"
    make(path)
    with pytest.raises(FileError, match=reason):
        read_toml(path) if suffix == ".toml" else read_json(path)
    assert reason in error_of("plan", LAYERS, "--stack", path)
    if suffix == ".toml" and kind in ("huge", "bytes"):  # such a file is not a layer file
        assert reason in error_of("plan", path)


def test_a_path_that_can_be_none_is_one_sentence(tmp_path: Path) -> None:
    for path, reason in ((Path("x" * 5000), "File name too long"), (Path("a\0b"), "null")):
        with pytest.raises(FileError, match=reason):
            read_bytes(path)
    assert "File name too long" in error_of("plan", "x" * 5000)
    with pytest.raises(ModelError, match=r"^the model 'xxx.*File name too long"):
        Engine.from_pretrained("x" * 5000)
    assert "File name too long" in error_of("plan", LAYERS, "--stack", "x" * 5000)


def test_a_pipe_without_a_writer_is_empty_and_one_with_a_writer_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert b"" == read_bytes(path)
    writer = subprocess.Popen(
        ["sh", "-c", f"exec 9<>{path}; echo ready; sleep 0; printf 12345 >&9; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    assert b"ready\n" == writer.stdout.readline()
    with pytest.raises(FileError, match="holds more than 0 MiB"):
        read_bytes(path, max_bytes=4)
    writer.communicate(b"\n")


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "stack.toml"
    path.write_bytes(b"\xef\xbb\xbf[cache]\n")
    assert {"cache": {}} == read_toml(path)


@pytest.mark.parametrize("text", ["[" * DEEP, '{"a":' * DEEP, "[" * 65 + "]" * 65, '{"a":' * 65 + "1" + "}" * 65])
def test_json_that_is_nested_deeply_is_refused(text: str) -> None:
    with pytest.raises(FileError, match="nested more than 64 times"):
        parse_json(text)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * DEEP,
        "a = " + "{a = " * DEEP,
        "a" + ".a" * DEEP + " = 1",
        "[" + "'a' . " * DEEP + "a]",
        "a.b" * 40,
    ],
)
def test_toml_that_is_nested_deeply_is_refused(text: str) -> None:
    with pytest.raises(FileError, match="is not valid TOML"):
        parse_toml(text)


def test_nesting_of_64_is_taken() -> None:
    assert parse_json("[" * 63 + "]" * 63)
    assert parse_toml("a" + ".a" * 60 + " = 1")


@pytest.mark.parametrize("digits", [20, 5000])
def test_numbers_of_many_digits_are_refused(digits: int) -> None:
    for text in ("9" * digits, f"[[{'9' * digits}]]"):
        with pytest.raises(FileError, match=r"a number has thousands of digits|a whole number of 67 bits"):
            parse_json(text)
    with pytest.raises(FileError, match=r"a number has thousands of digits|a whole number of 67 bits"):
        parse_toml(f"a = {'9' * digits}")
    with pytest.raises(FileError, match="a whole number of 80,000 bits; 64 are the most"):
        parse_toml("a = 0x" + "f" * 20_000)


def test_a_number_of_64_bits_is_the_largest_that_is_taken() -> None:
    assert 2**64 - 1 == parse_json(str(2**64 - 1))
    with pytest.raises(FileError, match="holds a whole number of 65 bits; 64 are the most"):
        parse_json(str(2**64))


def test_saved_prefixes_replace_only_such_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"}')
    arguments = ("generate", tmp_path, "--prompt", "a", "--save-prefixes")
    assert "is another kind of file; name another" in error_of(*arguments, path)
    assert "it is a device or a pipe" in error_of(*arguments, "/dev/null")
    assert "there is no folder" in error_of(*arguments, tmp_path / "none" / "prefixes")
    assert '{"model_type": "llama"}' == path.read_text()


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["10EiB", "9" * 500 + "GiB", "2000000TiB", "1e400"])
def test_a_size_beyond_any_machine_is_refused(memory: str) -> None:
    for option in ("--memory", "--cache-memory"):
        assert error_of("plan", LAYERS, option, memory).startswith(f"Invalid value for '{option}': ")


@pytest.mark.parametrize("option", ["--max-model-len", "--block-size", "--num-tokens"])
@pytest.mark.parametrize("number", ["10" * 9, "9" * 5000, "-1", "0", "nan"])
def test_a_number_beyond_any_use_is_refused(option: str, number: str) -> None:
    assert len(error_of("plan", LAYERS, option, number)) < 3000


@pytest.mark.parametrize("key", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_a_limit_beyond_32_bits_is_refused(key: str, tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text(f"[limits]\n{key} = 1_000_000_000_000\n")
    says = f"limits.{key} must be a whole number from 1 to 2147483647, not 1000000000000"
    assert says in error_of("plan", LAYERS, "--stack", stack)


def test_errors_show_the_ends_of_long_values_and_the_first_of_many_names() -> None:
    assert "a" * 133 + " … " + "a" * 67 + " (1,000 characters)" == shorten("a" * 1000)
    assert "1, 2, … and 1 more" == listed(["1", "2", "3"], limit=2)
    assert "a int that cannot be shown" == shown(10**5000)
    assert len(str(UnknownNameError("key", "a" * 10**6, [f"k{number}" for number in range(10_000)]))) < 1000


def test_an_error_of_many_unknown_keys_is_cut(tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text("".join(f"k{number} = 1\n" for number in range(50_000)))
    error = error_of("plan", LAYERS, "--stack", stack)
    assert len(error) < 3000
    assert "k0: there is no key named 'k0'" in error


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (
            'layers = "*"\nspec = { windw = 3 }',
            "rules[0].spec.windw: the cache spec 'full_attention' of layer 'layers.0': there is no option named",
        ),
        (
            'layers = "*"\nwrappers = [{ name = "chunked_local", chnk = 3 }]',
            "rules[0].wrappers[0]: wrapper 'chunked_local': there is no option 'chnk'; its options: chunk; did you "
            "mean 'chunk'?",
        ),
        (
            'layers = "*"\nbackend = { name = "flex", compil = true }',
            "rules[0].backend: backend 'flex': there is no option 'compil'; its options: compile; did you "
            "mean 'compile'?",
        ),
        ('layers = "layer.0"\nbackend = "torch"', 'rules[0] (layers = "layer.0") is for no layer of llama-3.1-8b;'),
        (
            'kind = "mla"\nbackend = "torch"',
            "is for no layer of llama-3.1-8b, whose layers are of the kind 'full_attention'",
        ),
    ],
)
def test_a_mistake_in_a_rule_names_file_key_and_nearest(rule: str, says: str, tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text(f"[[rules]]\n{rule}\n")
    error = error_of("explain", LAYERS, "--stack", stack)
    assert error.startswith(f"{stack}: ")
    assert says in error


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (
            '[[rules]]\nlayers = "*"\nbackend = { name = "flex", compile = 3 }',
            "rules[0].backend: backend 'flex': 'compile' must be in ('auto', 'always', 'never') (got 3); its options:",
        ),
        (
            '[[rules]]\nlayers = "*"\nbackend = { name = "torch_reference", compile = 3 }',
            "rules[0].backend: backend 'torch_reference' has no options, and is given compile",
        ),
        (
            '[[rules]]\nlayers = "*"\nwrappers = [{ name = "chunked_local", chnk = 3 }]',
            "rules[0].wrappers[0]: wrapper 'chunked_local': there is no option 'chnk'; its options: chunk",
        ),
        (
            '[model]\nprefill_skipping = { name = "decode_only", chunk = 2 }',
            "model.prefill_skipping: wrapper 'decode_only': there is no option 'chunk'; its options: none",
        ),
        ('[cache]\neviction = { name = "scan_resistant", patience = -1 }', "cache.eviction: eviction policy 'scan_"),
        ('[cache]\nformat = { name = "fp8_tensor", k_scal = 1 }', "cache.format: KV format 'fp8_tensor': there is no "),
        ('[model]\ndrafts = { name = "ngram", size = 3 }', "model.drafts: proposer 'ngram': there is no option 'size'"),
    ],
)
def test_planning_and_explaining_refuse_a_wrong_option_alike(tables: str, says: str, tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text(f"{tables}\n")
    error = error_of("plan", LAYERS, "--stack", stack)
    assert error.startswith(f"{stack}: {says}")
    assert error == error_of("explain", LAYERS, "--stack", stack)


def test_a_plan_does_not_import_a_backend_that_has_no_options(tmp_path: Path) -> None:
    stack = tmp_path / "stack.toml"
    stack.write_text('[[rules]]\nlayers = "*"\nbackend = "flex"\n')
    script = (
        "import sys; from kvframe.cli import main; main(sys.argv[1:], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", script, "plan", str(LAYERS), "--stack", str(stack)]
    assert 0 == subprocess.run(command, capture_output=True, check=False).returncode


@pytest.mark.parametrize(
    ("key", "value"), [("relative_bias", "wide"), ("scale", "1"), ("scale", True), ("soft_cap", []), ("has_sinks", 1)]
)
def test_a_wrong_query_side_is_one_sentence(key: str, value: object, tmp_path: Path) -> None:
    layer = {"name": "a", "kind": "full_attention", "num_kv_heads": 1, "head_size": 8, "query": {key: value}}
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"max_model_len": 64, "layers": [layer]}))
    assert f"layer 'a' (full_attention): QuerySpec.{key} must be " in error_of("explain", path)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_full_output_is_one_sentence() -> None:
    with Path("/dev/full").open("wb") as full:
        done = run_process("plan", LAYERS, stdout=full)
    assert "standard output cannot be written: No space left on device" == sentence_of(done)


def closing(number: int) -> Callable[[], None]:
    return lambda: os.close(number)


def test_a_closed_output_is_one_sentence() -> None:
    assert sentence_of(run_process("plan", LAYERS, preexec_fn=closing(1))).startswith("standard output is closed")


def test_a_closed_input_is_one_sentence() -> None:
    done = run_process("generate", LAYERS, "--prompts", "-", preexec_fn=closing(0))
    assert "- cannot be read: standard input is closed" == sentence_of(done)


def test_a_closed_stderr_changes_no_output() -> None:
    done = run_process("plan", LAYERS, preexec_fn=closing(2), stdout=subprocess.PIPE, stderr=None)
    assert (0, True) == (done.returncode, b"32 layers" in done.stdout)


def test_a_closed_pipe_is_not_reported() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = run_process("plan", LAYERS, stdout=writing)
    os.close(writing)
    assert (1, b"") == (done.returncode, done.stderr)


# --- text -------------------------------------------------------------------------------------------------------------


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_utf_8_is_utf_8_in_every_locale() -> None:
    done = run_process("generate", "none", "--prompt", "é", env=os.environ | C_LOCALE)
    assert "there is no file or folder none" == sentence_of(done)


def test_text_that_is_not_utf_8_is_one_sentence() -> None:
    command = [sys.executable, "-m", "kvframe", "generate", "none", "--prompt", b"\xff"]
    done = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    assert "Invalid value for '--prompt': '\\udcff' is not UTF-8 text" in sentence_of(done)


@pytest.mark.parametrize("typed", ["gemma_3_27.json", "gemma_3_27b.jsn", "gema_3_27b.json"])
def test_a_path_with_a_typo_brings_the_name_that_is_most_like_it(typed: str) -> None:
    folder = LAYERS.parent
    sentence = error_of("plan", folder / typed)
    assert f"there is no file or folder {folder / typed} (did you mean {folder / 'gemma_3_27b.json'}?)" == sentence


def test_a_name_with_control_characters_is_shown_escaped() -> None:
    assert r"there is no file or folder a; b\x1b[31m" == error_of("plan", "a\nb\x1b[31m")


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_escape_code_is_printed_if_none_is_wanted(
    variable: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv(*variable)
    render.print_table("Title", ("name", "count"), [("a", "12")])
    with render.progress("generating", 3) as show:
        show(3)
    assert "\x1b" not in "".join(capsys.readouterr())


_TERMINAL = """
import os, pty, sys
done = pty.spawn([sys.executable, "-m", "kvframe", *sys.argv[1:]], lambda fd: os.read(fd, 1 << 16))
"""


@pytest.mark.parametrize("no_color", ["1", ""])
def test_a_terminal_gets_escape_codes_unless_it_wants_none(no_color: str) -> None:
    command = [sys.executable, "-c", _TERMINAL, "plan", str(LAYERS)]
    environment = {**os.environ, "NO_COLOR": no_color, "TERM": "xterm"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
    assert (b"\x1b[" in done.stdout) == (no_color == "")
    assert b"32 layers" in done.stdout


# --- interrupts and bugs ----------------------------------------------------------------------------------------------


_INTERRUPT_AT = """
import importlib.abc, os, runpy, signal, sys

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == at:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

at = sys.argv[1]
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:], sys.argv[0] = sys.argv[2:], "kvframe"
runpy.run_module("kvframe", run_name="__main__")
"""


@pytest.mark.parametrize(
    "module",
    ["kvframe.cli", "click.core", "kvframe.config.stack", "numpy", "torch", "torch.nn", "kvframe_engine.engine"],
)
def test_an_interrupt_while_modules_load_is_no_error(module: str) -> None:
    command = [sys.executable, "-c", _INTERRUPT_AT, module, "generate", "examples", "--prompt", "a"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=240, cwd=ROOT)
    assert done.stderr.strip() in (b"kvframe: interrupted", b"")
    assert (130, b"") == (done.returncode, done.stdout)


def test_an_interrupt_that_python_would_print_and_forget_still_interrupts(capsys: pytest.CaptureFixture[str]) -> None:
    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)

    def command() -> None:
        Dying()
        signal.pause()

    assert 130 == guard.run_guarded(command)
    assert "kvframe: interrupted\n" == capsys.readouterr().err


@pytest.mark.parametrize(("is_typed_at", "code"), [(True, 130), (False, 0)])
def test_ctrl_c_that_a_shell_ignores_interrupts_what_somebody_types_at(
    is_typed_at: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 0 and is_typed_at)
        assert code == guard.run_guarded(lambda: signal.raise_signal(signal.SIGINT))
        assert signal.SIG_IGN is signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_that_became_another_error_is_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def command() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ImportError("numpy.core failed to import") from error

    assert 130 == guard.run_guarded(command)


def test_a_bug_is_reported_as_one_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert guard.BUG_EXIT_CODE == guard.run_guarded(lambda: [][0])
    shown = capsys.readouterr().err
    assert "IndexError" in shown
    assert shown.endswith("kvframe: this is a bug of kvframe: please report the command and the lines above\n")


@pytest.mark.parametrize(
    "error",
    [MemoryError("Unable to allocate 8 EiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")],
)
def test_a_lack_of_memory_is_one_sentence(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise error

    assert 2 == guard.run_guarded(command)
    assert f"kvframe: error: there is not enough memory: {error}\n" == capsys.readouterr().err


def test_a_mistake_in_the_options_is_one_line() -> None:
    result = run("plan")
    says = "kvframe: error: Missing argument 'MODEL_OR_CONFIG'; see `main plan --help`\n"
    assert (2, says) == (result.exit_code, result.stderr)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--blok-size", "No such option '--blok-size'; did you mean '--block-size'?"),
        ("--jsom", "No such option '--jsom'; did you mean '--json'?"),
        ("--unheard-of", "No such option '--unheard-of'; see `main plan --help`"),
    ],
)
def test_an_unknown_option_is_one_short_line(option: str, says: str) -> None:
    result = run("plan", "layers.json", option)
    assert (2, f"kvframe: error: {says}\n") == (result.exit_code, result.stderr)
    assert len(result.stderr) <= 80


def test_json_is_json_in_every_encoding(tmp_path: Path) -> None:
    layer = {"name": "é😀", "kind": "full_attention", "num_kv_heads": 1, "head_size": 8}
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"name": "é😀", "max_model_len": 64, "layers": [layer]}))
    done = run_process("plan", path, "--json", env=os.environ | C_LOCALE, stdout=subprocess.PIPE)
    assert "é😀" == json.loads(done.stdout)["model"]
