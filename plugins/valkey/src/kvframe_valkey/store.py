"""The store's options, and how it connects."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import attrs
import valkey

from kvframe.contract import OpenPageStore, PageStore
from kvframe.contract.errors import shown
from kvframe_valkey.address import UNIX, Address, parse_address
from kvframe_valkey.link import Connection, Link, ServerError
from kvframe_valkey.records import OpenValkeyStore

MAX_TIMEOUT = 600
MAX_EXPIRY = 10 * 365 * 24 * 60 * 60
MAX_PASSWORD_BYTES = 2**16


def _is_expiry(store: object, attribute: attrs.Attribute[int], value: object) -> None:
    if type(value) is not int or not 1 <= value <= MAX_EXPIRY:
        raise ValueError(f"expiry must be a whole number of seconds from 1 to {MAX_EXPIRY}, not {shown(value)}")


def _is_timeout(store: object, attribute: attrs.Attribute[float], value: object) -> None:
    if type(value) not in (int, float) or not 0 < value <= MAX_TIMEOUT:  # type: ignore[operator]
        raise ValueError(f"timeout must be a number of seconds, above 0 and at most {MAX_TIMEOUT}, not {shown(value)}")


def _is_text_or_none(store: object, attribute: attrs.Attribute[str | None], value: object) -> None:
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f"{attribute.name} must be a text, not {shown(value)}")


def _hide_password(url: object) -> str:
    try:
        return repr(str(parse_address(url)))
    except ValueError:
        return "…"


@attrs.frozen(kw_only=True)
class ValkeyStore(PageStore):
    """Records in a Valkey or Redis server, which engines on many machines share.

    Attributes:
        url: Where the server is: ``valkey://host:6379``, ``valkeys://`` with TLS, or ``unix:///path/of/socket``;
            ``redis://`` and ``rediss://`` mean the same. A number after it (``/1``, ``?db=1``) is a database.
        user: The user's name, if the URL has none; without any, the server's default user.
        password_variable: The environment variable that holds the password.
        password_file: The file whose first line is the password.
        expiry: Seconds after which the server removes a record that no engine reads or writes.
        timeout: The most seconds that a call waits for the server. A call with many records is split in parts of 8 MiB,
            and each may take so long.
        tls_ca_file: Certificates of the authorities that signed the server's, in PEM; without it, the system's.
        tls_certificate_file: This engine's own certificate, in PEM, for servers that ask for one.
        tls_key_file: Its private key; without it, the key is in ``tls_certificate_file``.
    """

    name: ClassVar[str] = "valkey"

    url: str = attrs.field(repr=_hide_password)
    user: str | None = attrs.field(default=None, validator=_is_text_or_none)
    password_variable: str | None = attrs.field(default=None, validator=_is_text_or_none)
    password_file: str | None = attrs.field(default=None, validator=_is_text_or_none)
    expiry: int = attrs.field(default=24 * 60 * 60, validator=_is_expiry)
    timeout: float = attrs.field(default=1.0, validator=_is_timeout)
    tls_ca_file: str | None = attrs.field(default=None, validator=_is_text_or_none)
    tls_certificate_file: str | None = attrs.field(default=None, validator=_is_text_or_none)
    tls_key_file: str | None = attrs.field(default=None, validator=_is_text_or_none)

    def __attrs_post_init__(self) -> None:
        address = parse_address(self.url)
        if address.user is not None and self.user is not None:
            raise ValueError("the url has a user, so there must be no option user")
        passwords = [address.password, self.password_variable, self.password_file]
        if sum(each is not None for each in passwords) > 1:
            raise ValueError("the password must be in one of the url, password_variable and password_file")
        tls_files = [self.tls_ca_file, self.tls_certificate_file, self.tls_key_file]
        if any(tls_files) and not address.has_tls:
            raise ValueError("files for TLS need a url that begins with valkeys:// or rediss://")
        if self.tls_key_file is not None and self.tls_certificate_file is None:
            raise ValueError("tls_key_file needs tls_certificate_file")

    def open(self, origin: str) -> OpenPageStore:
        """Read the password, connect, and check that the server answers.

        Files and the environment are read here: a stack may be checked on another machine, and files may change.
        """
        address = parse_address(self.url)
        link = Link(partial(_make_connection, self, address), str(address), self.timeout)
        store = OpenValkeyStore(link, origin, self.expiry)
        try:
            # A key that no record has.
            store.find([b""])
        except BaseException:
            store.close()
            raise
        return store


def _make_connection(store: ValkeyStore, address: Address, **options: Any) -> Connection:
    user, password = store.user or address.user, _read_password(store, address)
    options |= {"db": address.database, "username": user, "password": password}
    if address.scheme == UNIX:
        return valkey.UnixDomainSocketConnection(path=address.path, **options)
    options |= {"host": address.host, "port": address.port, "socket_keepalive": True}
    if not address.has_tls:
        return valkey.Connection(**options)
    for name in ("tls_ca_file", "tls_certificate_file", "tls_key_file"):
        file = getattr(store, name)
        if file is not None and not os.access(file, os.R_OK):
            raise ServerError(f"{address}: {name} {shown(file)} is no file that can be read here")
    return valkey.SSLConnection(
        ssl_ca_certs=store.tls_ca_file,
        ssl_certfile=store.tls_certificate_file,
        ssl_keyfile=store.tls_key_file,
        ssl_check_hostname=True,
        **options,
    )


def _read_password(store: ValkeyStore, address: Address) -> str | None:
    if store.password_variable is not None:
        password = os.environ.get(store.password_variable)
        if not password:
            raise ServerError(f"{address}: password_variable: the environment has no {shown(store.password_variable)}")
        return password
    if store.password_file is None:
        return address.password
    try:
        with Path(store.password_file).open(encoding="utf-8") as file:
            lines = file.read(MAX_PASSWORD_BYTES).splitlines()
    except (OSError, ValueError) as error:
        # A ValueError of wrong bytes has them.
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ServerError(f"{address}: password_file {shown(store.password_file)} cannot be read: {reason}") from None
    if not lines or not lines[0]:
        raise ServerError(f"{address}: password_file {shown(store.password_file)} is empty")
    return lines[0]
