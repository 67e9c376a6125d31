"""``kvframe schema``: a JSON Schema of the stack file, with the names that are installed here."""

from __future__ import annotations

import click

from kvframe.cli.render import print_json


@click.command(short_help="Print a JSON Schema of the stack file, for editors.")
def schema() -> None:
    """Print a JSON Schema of the stack file: every key, its values, what it says, and the names installed here.

    With `kvframe schema > kvframe.schema.json` and a first line `#:schema ./kvframe.schema.json`, an editor with a TOML
    language server completes and checks a stack file.
    """
    from kvframe.config.schema import make_schema
    from kvframe.loading.plugins import load_plugins

    host = load_plugins()
    names = {kind: catalogue.names() for kind, catalogue in host.registry.catalogues.items()}
    print_json(make_schema({**names, "plugin": sorted(record.name for record in host.records)}))
