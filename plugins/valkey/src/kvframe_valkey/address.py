"""Where a server is, from a URL. An error about a URL shows no part of it that may hold a password."""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import attrs

PLAIN_SCHEMES = ("valkey", "redis")
TLS_SCHEMES = ("valkeys", "rediss")
UNIX = "unix"
DEFAULT_PORT = 6379
MAX_DATABASE = 2**31 - 1

EXAMPLES = "valkey://host:6379, valkeys://host:6379/1 or unix:///run/valkey.sock?db=1"


@attrs.frozen(kw_only=True)
class Address:
    """Where a server is, and who connects.

    Attributes:
        scheme: One of the schemes above.
        host: The host's name or IP address; empty for a Unix socket.
        port: The TCP port.
        path: The path of a Unix socket; empty for TCP.
        database: The number of the database in the server.
        user: The user's name; None for the default user.
        password: Its password, if the URL has one.
    """

    scheme: str
    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""
    database: int = 0
    user: str | None = None
    password: str | None = attrs.field(default=None, repr=False)

    @property
    def has_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme in TLS_SCHEMES

    def __str__(self) -> str:
        """Return the URL without user and password."""
        if self.scheme == UNIX:
            return f"unix://{self.path}" + (f"?db={self.database}" if self.database else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}" + (f"/{self.database}" if self.database else "")


def parse_address(url: object) -> Address:
    """Return the address that a URL gives; raise ``ValueError`` if it is none."""
    if not isinstance(url, str):
        raise ValueError(f"url must be a text like {EXAMPLES}, not {type(url).__name__}")
    try:
        parts = urlsplit(url)
        port = parts.port  # raises if it is no number
    except ValueError:
        # The error has a part of the URL, so it is no cause.
        raise ValueError(f"url must be like {EXAMPLES}; its host or port is wrong, or the password unquoted") from None
    if parts.scheme not in (*PLAIN_SCHEMES, *TLS_SCHEMES, UNIX):
        raise ValueError(f"url must be like {EXAMPLES}; its scheme is unknown")
    user, password = (None if part is None else unquote(part) for part in (parts.username, parts.password))
    if parts.fragment:
        raise ValueError("url has a '#': write %23 if it belongs to the password")
    if parts.scheme == UNIX:
        return _parse_unix(parts, user or None, password or None)
    if parts.query:
        raise ValueError("url has a '?': give a database as in /1; write %3F if it belongs to the password")
    if not parts.hostname:
        raise ValueError(f"url must be like {EXAMPLES}; it has no host")
    return Address(
        scheme=parts.scheme,
        host=parts.hostname,
        port=DEFAULT_PORT if port is None else port,
        database=_parse_database(parts.path.removeprefix("/")),
        user=user or None,
        password=password or None,
    )


def _parse_unix(parts: SplitResult, user: str | None, password: str | None) -> Address:
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    database = _parse_database(options.pop("db", ""))
    if options or parts.hostname or not parts.path.startswith("/"):
        raise ValueError("url of a Unix socket must be like unix:///run/valkey.sock?db=1, with an absolute path")
    return Address(scheme=UNIX, path=unquote(parts.path), database=database, user=user, password=password)


def _parse_database(digits: str) -> int:
    if digits and not (digits.isascii() and digits.isdigit() and len(digits) <= 10 and int(digits) <= MAX_DATABASE):
        raise ValueError("url must end with the number of a database, as in /1 or ?db=1, or have none")
    return int(digits or 0)
