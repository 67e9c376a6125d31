"""The addresses of a publisher's two sockets."""

from __future__ import annotations

import re

_FORM = re.compile(r"(tcp)://([^/\s]+):(\d{1,5}|\*)|(ipc|inproc)://(\S+)")
_MOST_PORTS = 65535


def check_address(name: str, address: object) -> None:
    """Raise ``ValueError`` if a value is not an address; ``name`` is its option."""
    match = _FORM.fullmatch(address) if isinstance(address, str) else None
    port = match[3] if match else None
    if match is None or (port is not None and port.isdigit() and not 1 <= int(port) <= _MOST_PORTS):
        raise ValueError(
            f"{name} must be like tcp://127.0.0.1:5557, tcp://*:5557 or ipc:///run/events, not {address!r}"
        )


def replay_address(address: str) -> str:
    """Return the address of the replay socket beside an address: the next port, or the path with ``.replay``."""
    match = _FORM.fullmatch(address)
    if match is None or match[1] is None:
        return f"{address}.replay"
    host, port = match[2], match[3]
    return f"tcp://{host}:{'*' if port == '*' else int(port) + 1}"
