"""``kvframe plugins``: what is installed, whether it works here, and which names it registers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvframe.cli.options import json_option, read_stack, stack_option
from kvframe.cli.render import print_json, print_table

if TYPE_CHECKING:
    from kvframe.loading.claims import Claim
    from kvframe.loading.plugins import PluginHost
    from kvframe.loading.registry import Catalogue


@click.command(short_help="List the plugins and the names they register.")
@stack_option
@click.option("--check", is_flag=True, help="Import what the names stand for, and ask each backend if it can run here.")
@json_option
def plugins(stack_file: Path | None, check: bool, as_json: bool) -> None:
    """List the plugins: version, contract, status, why one is not in use, and the names they register.

    A name is "not imported" if the file of its class was found; --check imports the class.
    """
    from kvframe.loading.plugins import load_plugins

    host = load_plugins(read_stack(stack_file).plugins)
    names = [claim for catalogue in host.registry.catalogues.values() for claim in _names(catalogue, check)]
    if as_json:
        print_json(_to_dict(host, names))
        return
    print_table(
        "Plugins",
        ("plugin", "distribution", "version", "contract", "status", "reason"),
        [
            (each.name, each.distribution, each.version or "-", each.api_version or "-", each.status, each.reason)
            for each in host.records
        ],
    )
    print_table(
        "Registered names",
        ("kind", "name", "owner", "usable"),
        [(each["kind"], each["name"], each["owner"], _usable_in_words(each)) for each in names],
    )


def _names(catalogue: Catalogue, check: bool) -> list[dict[str, Any]]:
    """Return every claim to a name as plain values."""
    contested = catalogue.contested()
    return [
        {
            "kind": catalogue.kind,
            "name": claim.name,
            "owner": claim.owner,
            "plugin": claim.plugin,
            "contested": claim.name in contested,
            "missing": list(claim.missing()),
            "outdated": list(claim.outdated()),
            "install": claim.install,
            "problem": _problem(claim, check),
            "checked": check,
        }
        for claim in catalogue.claims()
    ]


def _problem(claim: Claim, check: bool) -> str:
    """Return why a name cannot be used; empty if it can, or if only an import could show it and ``check`` is False."""
    from kvframe.contract.errors import PluginError

    problem = claim.problem()
    if problem or not check:
        return problem
    try:
        return claim.why_unusable(claim.load())
    except PluginError as error:
        return str(error)


def _usable_in_words(name: dict[str, Any]) -> str:
    if name["contested"]:
        return f"contested: write {name['owner']}:{name['name']}, or choose an owner in the stack"
    if name["problem"]:
        return f"no: {name['problem']}"
    return "yes" if name["checked"] else "not imported"


def _to_dict(host: PluginHost, names: list[dict[str, Any]]) -> dict[str, Any]:
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
            for record in host.records
        ],
        "names": names,
    }
