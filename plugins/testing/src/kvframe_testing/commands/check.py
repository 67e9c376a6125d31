"""``kvframe check``: run the test kit on a plugin's parts, and print what works, what is refused, and what is wrong."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvframe.cli.options import TEXT_TYPE, json_option
from kvframe.cli.render import print_json, progress
from kvframe.contract.errors import PluginError, StackError, UnknownNameError, shown
from kvframe.loading.claims import KINDS

if TYPE_CHECKING:
    from kvframe.loading.claims import Claim
    from kvframe.loading.plugins import PluginHost, PluginRecord
    from kvframe_testing.checks import Checks, Report

WRONG_EXIT_CODE = 1
"""Exit code if a part is wrong."""

UNCHECKED_EXIT_CODE = 2
"""Exit code if nothing is wrong, and a part could not be checked; also that of a user's mistake."""

_WIDTH = 80
_COLUMNS = (34, 30, 10)
"""Characters of the columns of a matrix, which has lines of at most ``_WIDTH`` with two spaces before each column."""


@attrs.frozen(kw_only=True)
class _CheckRequest:
    """What the command line asks for."""

    name: str
    kind: str | None
    options: str | None
    model: Path | None
    device: str
    only: str | None
    whole: bool

    def command(self, kind: str, check: str) -> str:
        """Return the command that runs one check of one part."""
        words = ["kvframe", "check", self.name, "--kind", kind]
        for option, value in (("--options", self.options), ("--model", self.model)):
            words += [] if value is None else [option, str(value)]
        words += [] if self.device == "cpu" else ["--device", self.device]
        return shlex.join([*words, "--only", check])


@click.command(short_help="Test a plugin with the kit: what works, what is refused, what is wrong.")
@click.argument("name", type=TEXT_TYPE)
@click.option(
    "--kind",
    type=click.Choice([*KINDS]),
    metavar="KIND",
    help=f"Check only what is registered as this kind: {', '.join(KINDS)}.",
)
@click.option("--whole", is_flag=True, help="Run all checks, not a sample in which every feature occurs.")
@click.option("--only", metavar="PATTERN", type=TEXT_TYPE, help="Run only the checks with such a name, like 'full-*'.")
@click.option("--options", metavar="JSON", type=TEXT_TYPE, help="Options of the part, like '{\"window\": 4}'.")
@click.option("--model", type=click.Path(path_type=Path), metavar="PATH", help="A small model, for a model adapter.")
@click.option("--device", default="cpu", metavar="DEVICE", help="Where a backend runs. Default: cpu.")
@json_option
def check(
    name: str,
    kind: str | None,
    whole: bool,
    only: str | None,
    options: str | None,
    model: Path | None,
    device: str,
    as_json: bool,
) -> int:
    """Run the test kit on what NAME stands for.

    NAME is a registered name ("sliding_window"), an installed plugin, or a module with hooks ("my_module" or
    "path/to/my_module.py"). Exit code: 0 if all that was checked works, 1 if something is wrong, 2 if something could
    not be checked.
    """
    request = _CheckRequest(name=name, kind=kind, options=options, model=model, device=device, only=only, whole=whole)
    host, modules, entries = _find(request)
    parts = [_check_part(request, entry, host, modules) for entry in entries]
    if as_json:
        print_json({"name": name, "parts": parts})
    else:
        for part in parts:
            _print(part)
    verdicts = {part["verdict"] for part in parts}
    return WRONG_EXIT_CODE if "wrong" in verdicts else UNCHECKED_EXIT_CODE if "not checked" in verdicts else 0


# --- what a name stands for -------------------------------------------------------------------------------------------


def _find(request: _CheckRequest) -> tuple[PluginHost, Sequence[Any], Sequence[Claim]]:
    """Return the loaded plugins, the module that was named if any, and the claims to check."""
    from kvframe.loading.plugins import load_plugins

    host = load_plugins()
    modules = []
    claims = host.registry.claims()
    entries = [entry for entry in claims if request.name in (entry.name, entry.id)]
    if not entries:
        records = [record for record in host.records if request.name in (record.name, record.id, record.distribution)]
        for record in records:
            if record.status != "loaded":
                raise PluginError(f"plugin {record.id} was set aside, so it cannot be checked: {_why(record)}")
        if not records:
            modules = [_import(request.name, host, claims)]
            host = load_plugins(plugins=modules)
            claims = host.registry.claims()
        owners = {record.id for record in records} or {f"{module.__name__}:{module.__name__}" for module in modules}
        entries = [entry for entry in claims if entry.plugin in owners]
        if not entries:
            raise PluginError(f"the plugin {request.name!r} registers nothing, so there is nothing to check")
    entries_of_kind = [entry for entry in entries if request.kind in (None, entry.kind)]
    if not entries_of_kind:
        kinds = sorted({entry.kind for entry in entries})
        raise UnknownNameError("kind", str(request.kind), kinds, f"{request.name!r} is registered as these")
    return host, modules, entries_of_kind


def _why(record: PluginRecord) -> str:
    return f"{record.status}: {record.reason}"


def _import(name: str, host: PluginHost, claims: Sequence[Claim]) -> Any:
    """Import a module by its name or file; raise ``UnknownNameError`` if there is none."""
    import importlib
    import importlib.util
    import sys

    from kvframe.contract.foreign import call
    from kvframe.loading.misnamed import hint_for

    path = Path(name)
    folder = path.parent if path.suffix == ".py" else Path()
    if path.suffix == ".py" and not path.is_file():
        raise PluginError(f"there is no file {path}")
    module = path.stem if path.suffix == ".py" else name
    sys.path.insert(0, str(folder.resolve()))
    try:
        is_there = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        known_names = {*(entry.name for entry in claims), *(record.name for record in host.records)}
        set_aside = [f"{record.id} ({_why(record)})" for record in host.records if record.status != "loaded"]
        hint = f"plugins set aside: {'; '.join(set_aside)}" if set_aside else ""
        raise UnknownNameError("plugin, registered name or module", name, known_names, hint_for(name) or hint)
    return call(f"importing {module}", importlib.import_module, module)


# --- checking ---------------------------------------------------------------------------------------------------------


def _check_part(request: _CheckRequest, entry: Claim, host: PluginHost, modules: Sequence[Any]) -> dict[str, Any]:
    """Return what was found about one part, as plain values."""
    from kvframe.contract.errors import KVFrameError
    from kvframe_testing.checks import run_checks

    result: dict[str, Any] = {"kind": entry.kind, "name": entry.name, "owner": entry.owner}
    try:
        part = entry.load()
        if reason := entry.why_unusable(part):
            raise PluginError(f"it cannot run here: {reason}")
        checks = _checks_of(request, entry, part, host, modules)
        if request.only is not None:
            checks = checks.only(request.only)
    except (StackError, UnknownNameError):
        raise
    except KVFrameError as error:
        return {**result, "verdict": "not checked", "reason": str(error)}
    with progress(f"{KINDS[entry.kind].label} {entry.name}", len(checks.checks)) as show:
        report = run_checks(checks, show)
    return {**result, **_to_dict(request, entry, part, report)}


def _checks_of(request: _CheckRequest, entry: Claim, part: Any, host: PluginHost, modules: Sequence[Any]) -> Checks:
    """Return the checks of a part of any kind."""
    from kvframe_testing.checks import make_checks

    if entry.kind == "model_adapter" and request.model is None:
        raise PluginError("a model adapter is checked with a small model that it reads: give --model PATH")
    options = _parse(request.options)
    return make_checks(
        entry.kind,
        part,
        name=entry.name,
        options=[options] if entry.kind == "spec" and options is not None else options,
        whole=request.whole or request.only is not None,
        device=request.device,
        registry=host.registry,
        model=request.model,
        plugins=modules,
    )


def _parse(options: str | None) -> Mapping[str, Any] | None:
    try:
        table = None if options is None else json.loads(options)
    except ValueError as error:
        raise StackError(f"--options must be a JSON object, not {shown(options)}: {error}") from error
    if table is not None and not isinstance(table, dict):
        raise StackError(f"--options must be a JSON object, not {shown(options)}")
    return table


def _to_dict(request: _CheckRequest, entry: Claim, part: Any, report: Report) -> dict[str, Any]:
    from kvframe_testing.checks import source_of

    failure = next(iter(report.failures.items()), None)
    return {
        "verdict": "wrong" if report.failures else "works",
        "num_checks": report.num_checks,
        "num_passed": report.num_checks - len(report.failures),
        "features": [{**attrs.asdict(row), "codes": list(row.codes), "words": str(row)} for row in report.rows],
        "failure": failure
        and {
            "check": failure[0],
            "sentence": failure[1],
            "source": source_of(part, report.errors[failure[0]]),
            "command": request.command(entry.kind, failure[0]),
        },
    }


# --- printing ---------------------------------------------------------------------------------------------------------


def _print(part: Mapping[str, Any]) -> None:
    """Print what was found about one part, in lines of 80 characters; a command is one line."""
    title = f"{KINDS[part['kind']].label} {part['name']!r} of {part['owner']}"
    if part["verdict"] == "not checked":
        _say(f"{title} was not checked: {part['reason']}")
        click.echo()
        return
    _say(f"{title}: {part['num_passed']} of {part['num_checks']} checks passed")
    click.echo()
    for row in part["features"]:
        counts = f"{row['num_passed']} of {row['num_checks']}" if row["num_checks"] else ""
        for line in _folded(row["feature"], row["words"], counts):
            is_wrong = row["verdict"] == "wrong"
            click.echo(click.style(line, fg="red", bold=True) if is_wrong else line)
    click.echo()
    if part["failure"]:
        _say(f"The first failure: {part['failure']['sentence']}")
        if part["failure"]["source"]:
            click.echo(f"See: {part['failure']['source']}")
        click.echo(f"Run it again: {part['failure']['command']}\n")


def _say(sentence: str) -> None:
    click.echo(textwrap.fill(sentence, _WIDTH, break_on_hyphens=False))


def _folded(*cells: str) -> Iterator[str]:
    """Yield the lines of a row whose cells are folded to the columns."""
    cell_lines = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, _COLUMNS, strict=True)]
    for index in range(max(map(len, cell_lines))):
        line = "  ".join(
            (lines[index] if index < len(lines) else "").ljust(width)
            for lines, width in zip(cell_lines, _COLUMNS, strict=True)
        )
        yield f"  {line}".rstrip()
