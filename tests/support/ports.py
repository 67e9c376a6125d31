"""Ports for the servers that tests start: no other test and no outgoing connection takes one before its server does."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

PORTS = range(20_000, 30_000)
"""The kernel gives none of these to a socket that asks for any port: its own begin at 32,768 (Linux) or above."""

_claims: list[IO[str]] = []


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on; it is this process's until it ends."""
    folder = Path(tempfile.gettempdir()) / f"kvframe_ports_{os.getuid()}"  # another user may write no file of this one
    folder.mkdir(exist_ok=True)
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        claim = (folder / str(port)).open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            claim.close()
        else:
            _claims.append(claim)
            return port
    raise RuntimeError("every port is taken")
