"""``kvframe plugins``: what is installed, whether it works here, and which names it registers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from kvframe.cli.options import json_option, read_stack, stack_option
from kvframe.cli.render import line_width, print_facts, print_json, print_note, print_reasons, print_table
from kvframe.contract.errors import KVFrameError, UnknownNameError

if TYPE_CHECKING:
    from kvframe.loading.claims import Claim
    from kvframe.loading.plugins import PluginRecord
    from kvframe.loading.registry import Registry


def _complete(context: click.Context, parameter: click.Parameter, prefix: str) -> list[CompletionItem]:
    """Complete names of plugins, and registered names of any kind."""
    from kvframe.loading.plugins import load_plugins

    try:
        host = load_plugins()
    except KVFrameError:
        return []
    claims = host.registry.claims()
    owners = {record.name: record.distribution for record in host.records} | {
        claim.name: claim.owner for claim in claims
    }
    return [CompletionItem(name, help=owner) for name, owner in sorted(owners.items()) if name.startswith(prefix)]


@click.command(short_help="List the plugins and the names they register.")
@click.argument("wanted_names", nargs=-1, metavar="[NAME]...", shell_complete=_complete)
@click.option("--verbose", is_flag=True, help="Say everything about every plugin.")
@stack_option
@click.option("--check", is_flag=True, help="Import what the names stand for, and ask each backend if it can run here.")
@json_option
def plugins(wanted_names: tuple[str, ...], verbose: bool, stack_file: Path | None, check: bool, as_json: bool) -> None:
    """List the plugins, one a line: version, status and the names they register; and why a name cannot be used here.

    A NAME is that of a plugin, of its distribution, or one that it registers: then everything about these plugins is
    said. A registered name is "not imported" if the file of its class was found; --check imports the class.
    """
    from kvframe.loading.plugins import load_plugins

    host = load_plugins(read_stack(stack_file).plugins)
    claims = host.registry.claims()
    records = _chosen(host.records, claims, wanted_names)
    plugin_ids = {record.id for record in records}
    names = _names(host.registry, check, plugin_ids)
    if as_json:
        print_json(_to_dict(records, names))
    elif wanted_names or verbose:
        for record in records:
            _print_whole(record, [entry for entry in names if entry["plugin"] == record.id])
    else:
        _print(records, names, check)


def _chosen(
    records: Sequence[PluginRecord], claims: Sequence[Claim], wanted_names: Sequence[str]
) -> list[PluginRecord]:
    """Return the plugins that are named by their own name, their distribution or a name that they register."""
    ids_by_name: dict[str, set[str]] = {}
    for record in records:
        for name in (record.name, record.id, record.distribution):
            ids_by_name.setdefault(name, set()).add(record.id)
    for claim in claims:
        for name in (claim.name, claim.id):
            ids_by_name.setdefault(name, set()).add(claim.plugin)
    for name in wanted_names:
        if name not in ids_by_name:
            from kvframe.loading.misnamed import hint_for

            known_names = {record.name for record in records} | {claim.name for claim in claims}
            hint = hint_for(name) or "`kvframe plugins` lists them"
            raise UnknownNameError("plugin or registered name", name, sorted(known_names), hint)
    chosen_ids = {plugin for name in wanted_names for plugin in ids_by_name[name]}
    return [record for record in records if not wanted_names or record.id in chosen_ids]


def _print(records: Sequence[PluginRecord], names: Sequence[dict[str, Any]], check: bool) -> None:
    """Print one line for each plugin, then the plugins that were set aside and the names that cannot be used here."""
    columns = ("plugin", "version", "status")
    rows = [(record.name, record.version or "-", record.status) for record in records]
    table_width = sum(max(map(len, cells)) for cells in zip(columns, *rows, strict=True))
    width = line_width() - table_width - 2 * (len(columns) + 1)
    print_table(
        "Plugins",
        (*columns, "registers"),
        [
            (*row, _registered([entry for entry in names if entry["plugin"] == record.id], width))
            for row, record in zip(rows, records, strict=True)
        ],
    )
    reasons: dict[str, list[str]] = {}
    for record in records:
        if record.reason:
            reasons.setdefault(f"{record.status}: {record.reason}", []).append(f"plugin {record.id}")
    for entry in names:
        if entry["contested"] or entry["problem"]:
            reasons.setdefault(_usable(entry), []).append(f"{entry['kind'].replace('_', ' ')} {entry['name']}")
    if reasons:
        print_reasons("Not usable here", reasons)
    advice = "" if check else "; --check imports classes"
    print_note(f"`kvframe plugins NAME` says everything about a name{advice}")


def _registered(names: Sequence[dict[str, Any]], width: int) -> str:
    """Return the names that a plugin registers by kind, or their numbers if the names are longer than a line."""
    by_kind: dict[str, list[str]] = {}
    for entry in names:
        by_kind.setdefault(entry["kind"].replace("_", " "), []).append(entry["name"])
    full_text = ", ".join(f"{kind} {', '.join(kind_names)}" for kind, kind_names in by_kind.items())
    short_text = ", ".join(
        f"{len(kind_names)} {kind}{'s' * (len(kind_names) > 1)}" for kind, kind_names in by_kind.items()
    )
    return (full_text if len(full_text) <= width else short_text) or "-"


def _print_whole(record: PluginRecord, names: Sequence[dict[str, Any]]) -> None:
    """Print everything about one plugin."""
    print_facts(
        record.id,
        [
            ("version", record.version or "unknown"),
            ("contract", record.api_version or "not stated"),
            ("status", f"{record.status}: {record.reason}" if record.reason else record.status),
            *((f"{entry['kind'].replace('_', ' ')} {entry['name']}", _in_words(entry)) for entry in names),
        ],
    )


def _names(registry: Registry, check: bool, plugins: Collection[str]) -> list[dict[str, Any]]:
    """Return these plugins' claims to names as plain values.

    ``problem`` says why a name cannot be used. It is empty if the name can be used, or if only an import could show
    that it cannot and ``check`` is False.
    """
    return [
        {
            "kind": claim.kind,
            "name": claim.name,
            "owner": claim.owner,
            "plugin": claim.plugin,
            "contested": claim.name in registry.catalogues[claim.kind].contested(),
            "missing": list(claim.missing()),
            "outdated": list(claim.outdated()),
            "install": claim.install,
            "problem": claim.problem(imports=check),
            "checked": check,
        }
        for claim in registry.claims()
        if claim.plugin in plugins
    ]


def _in_words(name: dict[str, Any]) -> str:
    """Return whether a name can be used."""
    if name["contested"] or name["problem"]:
        return f"not usable: {_usable(name)}"
    return "usable" if name["checked"] else "not imported"


def _usable(name: dict[str, Any]) -> str:
    """Return why a name cannot be used."""
    if name["contested"]:
        return f"contested: write {name['owner']}:{name['name']}, or choose an owner in the stack"
    return str(name["problem"])


def _to_dict(records: Sequence[PluginRecord], names: list[dict[str, Any]]) -> dict[str, Any]:
    from kvframe.contract.hookspecs import API_VERSION

    return {
        "api_version": API_VERSION,
        "plugins": [
            {
                "name": record.name,
                "distribution": record.distribution,
                "version": record.version,
                "api": record.api_version,
                "status": record.status,
                "reason": record.reason,
            }
            for record in records
        ],
        "names": names,
    }
