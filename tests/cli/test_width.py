"""What the commands print fits the width of the terminal, or 80 columns in a pipe, and says each thing once."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvframe.cli import main, render
from kvframe.loading.plugins import load_plugins
from tests.covering import cover_values
from tests.loading.fake_distributions import FakeSite, registers
from tests.programs import start_program
from tests.support.commands import stdout_of as run

ROOT = Path(__file__).resolve().parents[2]
LAYERS = sorted((ROOT / "examples" / "layers").iterdir())
GEMMA = ROOT / "examples" / "layers" / "gemma_3_27b.json"


def run_on_terminal(columns: int, *arguments: object) -> str:
    """Run a command on a terminal of some columns; return what it shows, without escape codes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    files = dict.fromkeys(range(3), theirs)
    process = start_program(["-m", "kvframe", *map(str, arguments)], files, environment=environment | {"TERM": "xterm"})
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # Linux: the other side is closed
            break
    process.join()
    os.close(ours)
    assert process.exitcode == 0, shown.decode()
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n")


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


# --- whole commands ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "command"),
    cover_values(LAYERS, ("plan", "plan --no-hybrid", "explain", "explain --verbose")),
)
def test_what_is_said_of_published_models_fits_80_columns_in_a_pipe(layers: Path, command: str) -> None:
    name, *options = command.split()
    assert widest(run(name, layers, *options)) <= 80


@pytest.mark.parametrize("options", [(), ("--check",), ("--verbose",), ("flash_attn", "flashinfer", "triton")])
def test_plugins_fit_80_columns_in_a_pipe(options: tuple[str, ...]) -> None:
    assert widest(run("plugins", *options)) <= 80


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize(
    "command", [("plugins",), ("plan", GEMMA), ("explain", GEMMA), ("explain", GEMMA, "--verbose")]
)
def test_a_terminal_of_few_columns_is_filled_and_not_overrun(command: tuple[object, ...], columns: int) -> None:
    assert columns - 20 < widest(run_on_terminal(columns, *command)) <= columns


def test_a_terminal_and_a_pipe_of_one_width_show_the_same_but_for_the_rule() -> None:
    shown = [line for line in run_on_terminal(80, "explain", GEMMA).splitlines() if "───" not in line]
    assert run("explain", GEMMA).splitlines() == shown


@pytest.mark.parametrize("columns", ["1", "9" * 5000])
@pytest.mark.parametrize(
    "command",
    [("plugins",), ("plugins", "mla"), ("plan", GEMMA), ("explain", GEMMA), ("plan", "--help"), ("--help",)],
    ids=lambda command: " ".join(map(str, command[:1])),
)
def test_no_number_of_columns_ends_a_command(
    command: tuple[object, ...], columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert 20 <= widest(run(*command)) <= 1000


@pytest.mark.parametrize("columns", [1, 7])
def test_a_terminal_may_be_narrower_than_any_word(columns: int) -> None:
    assert "gemma-3-27b" in run_on_terminal(columns, "explain", GEMMA)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [("1", 20), ("\u0663", 20), ("60", 60), ("9" * 30, 1000), ("9" * 5000, 1000), ("0", 80), ("-3", 80), ("abc", 80)],
)
def test_a_line_and_a_progress_bar_have_20_to_1000_columns(
    columns: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert [expected, expected] == [render.line_width(), render.make_console(sys.stderr).width]


def test_the_help_of_every_command_fits_80_columns() -> None:
    for name in ("", *main.list_commands(main.make_context("kvframe", ["plugins"]))):
        assert widest(run_on_terminal(80, *filter(None, [name]), "--help")) <= 80


def test_plugins_are_one_line_each() -> None:
    lines = run("plugins").partition("\n\n")[0].splitlines()
    assert [record.name for record in load_plugins().records] == [line.split()[0] for line in lines[2:]]


def test_plugins_are_fewer_than_45_lines() -> None:
    assert len(run("plugins").splitlines()) < 45


def test_names_that_do_not_fit_a_line_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = "format fp8_tensor, fp8_token_head, int4_token_head, int8_token_head"
    assert re.search(r"kv_formats +\S+ +loaded +4 formats\n", run("plugins"))
    monkeypatch.setenv("COLUMNS", "120")
    assert re.search(rf"kv_formats +\S+ +loaded +{formats}\n", run("plugins"))


def test_a_reason_is_said_once_for_all_names_that_it_holds_for() -> None:
    shown = run("plugins")
    assert 1 == shown.count("needs flashinfer;")
    assert "backend flashinfer, backend flashinfer_mla: needs flashinfer;" in shown


def test_a_plugin_that_is_set_aside_has_its_reason_below_the_table(site: FakeSite) -> None:
    site.add("acme-late", "late", registers("backends", ("late", "acme_late:Late")), api="v1_99")
    table, _, below = run("plugins").partition("Not usable here")
    assert re.search(r"\n +late +\S+ +incompatible +-\n", table)
    assert "plugin acme-late:late: incompatible: " in below


def test_everything_about_a_plugin_is_said_by_its_name_its_distribution_or_a_name_that_it_registers() -> None:
    by_plugin = run("plugins", "mla")
    assert by_plugin == run("plugins", "kvframe-mla") == run("plugins", "kvframe-mla:mla")
    assert by_plugin.startswith("kvframe-mla:mla\n  version ")
    assert "kvframe-torch:torch\n" == run("plugins", "torch_varlen").splitlines(keepends=True)[0]


def test_an_unknown_name_of_a_plugin_names_the_nearest() -> None:
    result = CliRunner().invoke(main, ["plugins", "flash_atn"])
    assert (2, True) == (result.exit_code, "did you mean 'flash_attn'?" in result.stderr)


def test_explain_says_each_reason_once_with_the_rows_that_it_holds_for() -> None:
    shown = run("explain", GEMMA)
    reasons = shown.partition("Why not the others\n")[2]
    assert 1 == reasons.count("can serve this layer;") == reasons.count("runs on cuda, not on cpu")
    assert "flex, numba, torch, torch_reference: can serve this layer;" in reasons
    assert "mla (row 1): reads the state tensors latent, not k, v; has no mask" in reasons
    assert "mla (row 2): reads the state tensors latent, not k, v\n" in reasons
    assert len(shown.splitlines()) < 30


def test_explain_leaves_rows_without_a_backend_out_of_the_reasons() -> None:
    shown = run("explain", ROOT / "examples" / "layers" / "qwen3_next_80b.toml")
    assert "computed by the" in shown
    assert "(row" not in shown


def test_explain_says_all_of_it_row_by_row_on_request() -> None:
    shown = run("explain", GEMMA, "--verbose")
    assert ["Row 1: why not", "Row 2: why not"] == [line for line in shown.splitlines() if line.startswith("Row")]
    assert 2 == shown.count("  kvframe-triton:triton   ")


# --- tables, facts and reasons ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", range(12, 60))
def test_a_table_of_any_width_loses_no_word(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    render.print_table("T", ("name", "size", "why"), [("alpha, beta", "1,024", "one two three"), ("g", "7", "four")])
    shown = capsys.readouterr().out
    for word in ("alpha,", "beta", "1,024", "one", "two", "three", "four"):
        assert word in shown
    # Below a width, each value gets a line, and the names before them take what they need.
    assert widest(shown) <= max(columns, 34)


def test_the_widest_column_folds_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    render.print_table("T", ("a", "b"), [("short text", "a longer text of six words")])
    assert "T\n  a           b\n  short text  a longer text of\n              six words\n\n" == capsys.readouterr().out


def test_headings_fold_before_cells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    render.print_table("T", ("most blocks", "text"), [("193", "two words each")])
    assert "T\n    most  text\n  blocks\n     193  two words each\n\n" == capsys.readouterr().out


def test_numbers_are_never_folded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    render.print_table("T", ("page size", "text"), [("1.50 MiB", "some words"), ("10.00 MiB", "more")])
    assert "   1.50 MiB  some\n             words\n  10.00 MiB  more\n" in capsys.readouterr().out


def test_a_table_whose_columns_do_not_fit_is_printed_row_by_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [["alpha" * 8, "beta" * 8], ["gamma" * 8, "delta" * 8]]
    monkeypatch.setenv("COLUMNS", "60")
    render.print_table("Names", ["first", "second"], rows)
    assert "(1 of 2)" not in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "40")
    render.print_table("Names", ["first", "second"], rows)
    told = capsys.readouterr().out
    assert "Names (2 of 2)" in told
    assert f"  second  {('delta' * 8)[:30]}\n          {('delta' * 8)[30:]}\n" in told


def test_long_facts_fold_under_their_value(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    render.print_facts("T", [("name", "a value that is longer than one line"), ("empty", "")])
    assert "T\n  name   a value that is longer than one\n         line\n  empty\n\n" == capsys.readouterr().out


@pytest.mark.parametrize("asked", ["", "0", "-3", "wide", "²"])
def test_a_width_that_is_no_number_is_ignored(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", asked)
    assert 80 == render.line_width()
