"""``kvframe serve``: serve a model by OpenAI's interface."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import click

if TYPE_CHECKING:
    from kvframe_serve.server import Server

_ENDED_EXIT_CODE = 71
"""Exit code if the engine has ended by itself: a rank failed."""

_KEYS_VARIABLE = "KVFRAME_API_KEYS"


@click.command(short_help="Serve a model by OpenAI's interface.")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="The address to listen on; 0.0.0.0 for all addresses."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="The port to listen on; 0 for any free one.",
)
@click.option("--stack", "stack_file", type=click.Path(path_type=Path), metavar="FILE", help="The stack file (TOML).")
@click.option(
    "--memory", metavar="SIZE", help="Memory for the KV cache, such as 2GiB, or auto. Default: as in the stack."
)
@click.option(
    "--max-model-len",
    type=click.IntRange(min=1),
    metavar="N",
    help="The longest request, in tokens. Default: as in the stack, or the model's own.",
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="Where to run, such as cpu or cuda. Default: as in the stack, or the GPU if there is one.",
)
@click.option(
    "--dtype",
    metavar="DTYPE",
    help="The model's dtype, such as bfloat16. Default: as in the stack, or the checkpoint's.",
)
@click.option(
    "--served-name",
    metavar="NAME",
    help="The name that clients use; default: that of the folder, or the repository's id.",
)
@click.option(
    "--task",
    type=click.Choice(["generate", "embed"]),
    help="Whether to generate tokens or to make embeddings; default: what the model is for.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="What running requests get to end after Ctrl-C, SIGTERM or SIGHUP.",
)
@click.option(
    "--api-key",
    "keys",
    multiple=True,
    metavar="KEY",
    help=f"A key that is accepted; repeat for several, or separate them by spaces in {_KEYS_VARIABLE}. Without keys, "
    "every caller is served.",
)
def serve(
    model: Path,
    host: str,
    port: int,
    stack_file: Path | None,
    memory: str | None,
    max_model_len: int | None,
    device: str | None,
    dtype: str | None,
    served_name: str | None,
    task: str | None,
    grace: float,
    keys: tuple[str, ...],
) -> None:
    """Serve MODEL, a model's folder or the id of a repository, by OpenAI's interface.

    One engine serves all requests in one batch, and caches their prefixes. Callers with different keys share none of
    them, and share the batch fairly; the header X-Cache-Salt divides further. The stack's [plugin.serve] limits
    requests.
    """
    keys = _checked_keys(keys)
    if not host:
        raise click.UsageError("--host is empty; write 0.0.0.0 to listen on all addresses")
    if os.environ.get("RANK", "0") == "0":  # under torchrun, the first rank has the server
        _bind(host, port).close()  # a wrong address is said before a model is loaded
        from kvframe_serve.reading.process import prepare

        prepare()

    from kvframe import Stack, find_model

    stack = Stack() if stack_file is None else Stack.from_file(stack_file)
    stack = stack.with_options(
        cache={"memory": memory}, model={"device": device, "dtype": dtype}, limits={"max_model_len": max_model_len}
    )

    from kvframe_serve.application import Task
    from kvframe_serve.server import Server

    _log_to_stderr()
    folder = find_model(model, weights=True)
    server = Server(
        folder,
        stack=stack,
        name=served_name or (str(model) if folder != model else None),
        keys=keys,
        task=cast("Task | None", task),
    )
    try:
        listener = _bind(host, port)
    except BaseException:
        server.close()
        raise
    port = listener.getsockname()[1]
    for name, value in server.describe().items():
        click.echo(f"{name + ':':<12} {value}", err=True)
    if not keys and not _is_local(listener):
        click.echo(f"WARNING: whoever reaches {host}:{port} is served, since there is no --api-key", err=True)
    click.echo(f"serving {server.name} on http://{_url_host(host)}:{port}/v1", err=True)
    _ignore_sigterm_once_ended(server)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell ignores it for what runs in the background. uvicorn does not, and raises it again for this handler.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(server.run(listener, grace=grace))
    if server.ended_by:
        click.echo(f"error: {server.ended_by}", err=True)
        # Python's own end takes a second, in which SIGTERM would replace the exit code, and may wait for a lost rank.
        os._exit(_ENDED_EXIT_CODE)


def _ignore_sigterm_once_ended(server: Server) -> None:
    """Keep this process's exit code if the engine ended: torchrun sends SIGTERM to all ranks when one has failed."""

    def end(number: int, _frame: FrameType | None) -> None:
        if not server.ended_by:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    # uvicorn has a handler of its own while it runs, and afterwards raises the signal again for this one.
    signal.signal(signal.SIGTERM, end)


def _checked_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keys of the options, or of the environment; an empty one would serve whoever sends none."""
    if not keys and _KEYS_VARIABLE in os.environ:
        keys = tuple(os.environ[_KEYS_VARIABLE].split())
        if not keys:
            raise click.UsageError(f"{_KEYS_VARIABLE} is set and holds no key; unset it to serve every caller")
    if any(not key.strip() for key in keys):
        raise click.UsageError("--api-key is empty; leave it out to serve every caller")
    return keys


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket at an address, which does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY on connections only if their protocol is named; without it an answer may wait for 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise click.ClickException(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --host or --port"
        ) from error
    return listener


def _is_local(listener: socket.socket) -> bool:
    address: Any = listener.getsockname()[0]
    return str(address).startswith("127.") or address == "::1"


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _log_to_stderr() -> None:
    """Write the log of requests, and warnings of all libraries, to stderr."""
    from kvframe_serve.request_log import FloodFilter

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(FloodFilter())
    for name in ("kvframe", "uvicorn", "asyncio"):
        log = logging.getLogger(name)
        log.addHandler(handler)
        log.propagate = False
    logging.getLogger("kvframe").setLevel(logging.INFO)
