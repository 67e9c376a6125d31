"""``kvframe serve``: serve a model by OpenAI's interface."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import click


@click.command(short_help="Serve a model by OpenAI's interface.")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.option("--stack", "stack_file", type=click.Path(path_type=Path), metavar="FILE", help="The stack file (TOML).")
@click.option(
    "--served-name",
    metavar="NAME",
    help="The name that clients use; default: that of the folder, or the repository's id.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="What running requests get to end after Ctrl-C or SIGTERM.",
)
@click.option(
    "--api-key",
    "keys",
    multiple=True,
    envvar="KVFRAME_API_KEYS",
    metavar="KEY",
    help="A key that is accepted; repeat for several. Without keys, every caller is served.",
)
def serve(
    model: Path,
    host: str,
    port: int,
    stack_file: Path | None,
    served_name: str | None,
    grace: float,
    keys: tuple[str, ...],
) -> None:
    """Serve MODEL, a model's folder or the id of a repository, by OpenAI's interface: chat and completions.

    One engine serves all requests in one batch, and caches their prefixes. Callers with different keys share none of
    them; the header X-Cache-Salt divides further. The stack's [plugin.serve] limits requests.
    """
    place = _bound(host, port)

    from kvframe import Stack, find_model
    from kvframe_serve.server import Server

    folder = find_model(model, weights=True)
    server = Server(
        folder,
        stack=None if stack_file is None else Stack.from_file(stack_file),
        name=served_name or (str(model) if folder != model else None),
        keys=keys,
    )
    click.echo(f"serving {server.served.name} on http://{host}:{port}/v1", err=True)
    asyncio.run(server.run(place, grace=grace))


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket at an address, which does not listen yet: a wrong address is said before a model is loaded."""
    place = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind((host, port))
    except OSError as error:
        place.close()
        raise click.ClickException(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --host or --port"
        ) from error
    return place
