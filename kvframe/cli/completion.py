"""Completes registered names and plugins on the command line, from the plugins that are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from kvframe.contract.errors import KVFrameError

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_registered(kind: str) -> Complete:
    """Return what completes registered names of a kind (``"backend"``), each with its distribution as help."""

    def complete(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        from kvframe.loading.plugins import load_plugins

        try:
            catalogue = load_plugins().registry.catalogues[kind]
        except KVFrameError:
            return []  # a shell shows no errors while somebody types
        return _matching(((entry.name, entry.owner) for entry in catalogue.claims()), begun)

    return complete


def complete_plugins(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete names of plugins, and registered names of any kind."""
    from kvframe.loading.plugins import load_plugins

    try:
        host = load_plugins()
    except KVFrameError:
        return []
    claims = [entry for catalogue in host.registry.catalogues.values() for entry in catalogue.claims()]
    return _matching(
        [
            *((record.name, record.distribution) for record in host.records),
            *((each.name, each.owner) for each in claims),
        ],
        begun,
    )


def _matching(names: Iterable[tuple[str, str]], begun: str) -> list[CompletionItem]:
    return [CompletionItem(name, help=of) for name, of in sorted(dict(names).items()) if name.startswith(begun)]
