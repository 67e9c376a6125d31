"""What a stack may give to the store, and that no error, text or repr shows a password."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
from kvframe_valkey.address import parse_address
from kvframe_valkey.link import ServerError
from kvframe_valkey.store import ValkeyStore

ORIGIN = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("url", "text", "user", "password"),
    [
        ("valkey://host", "valkey://host:6379", None, None),
        ("redis://Host:7000/3", "redis://host:7000/3", None, None),
        ("valkeys://me:secret@host", "valkeys://host:6379", "me", "secret"),
        ("rediss://:a%2Fb%40@[::1]:1/0", "rediss://[::1]:1", None, "a/b@"),
        ("unix:///run/a%20b.sock", "unix:///run/a b.sock", None, None),
        ("unix://me:secret@/run/s?db=4", "unix:///run/s?db=4", "me", "secret"),
    ],
)
def test_an_address_is_read_from_a_url(url: str, text: str, user: str | None, password: str | None) -> None:
    address = parse_address(url)
    assert (text, user, password) == (str(address), address.user, address.password)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host",
        "secret:6379",
        "http://me:secret@host",
        "valkey://",
        "valkey://:secret@",
        "valkey://me:secret@host:port",
        "valkey://me:secret@host:99999",
        "valkey://me:sec/ret@host",
        "valkey://me:12#secret@host",
        "valkey://me:12?secret@host",
        "valkey://me:12/secret@host",
        "valkey://me:[secret@host",
        "valkey://host/99999999999",
        "valkey://host/-1",
        "valkey://host?password=secret",
        "unix://run/secret",
        "unix:secret",
        "unix:///run/s?db=secret",
        "unix:///run/s?password=secret",
        5,
    ],
)
def test_a_url_that_is_none_is_refused_without_showing_it(url: Any) -> None:
    with pytest.raises(ValueError, match="url ") as refusal:
        ValkeyStore(url=url)
    assert "secret" not in "".join(traceback.format_exception_only(refusal.value))
    # A traceback prints errors before it too.
    assert refusal.value.__context__ is None or refusal.value.__suppress_context__


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"expiry": 0}, "expiry must be a whole number of seconds from 1 to 315360000, not 0"),
        ({"expiry": 1.5}, "expiry must be a whole number"),
        ({"expiry": True}, "expiry must be a whole number"),
        ({"timeout": 0}, "timeout must be a number of seconds, above 0 and at most 600, not 0"),
        ({"timeout": float("nan")}, "timeout must be a number"),
        ({"timeout": "1"}, "timeout must be a number"),
        ({"user": ""}, "user must be a text, not ''"),
        ({"password_file": 5}, "password_file must be a text, not 5"),
        ({"url": "valkey://me@host", "user": "me"}, "the url has a user, so there must be no option user"),
        ({"url": "valkey://:x@host", "password_variable": "SET"}, "the password must be in one of the url"),
        ({"tls_ca_file": __file__}, "files for TLS need a url that begins with valkeys:// or rediss://"),
        ({"url": "valkeys://host", "tls_key_file": __file__}, "tls_key_file needs tls_certificate_file"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=r"^[a-z]") as refusal:
        ValkeyStore(**{"url": "valkey://host", **options})
    assert reason in str(refusal.value)


def test_no_repr_shows_a_password() -> None:
    store = ValkeyStore(url="valkey://me:secret@host")
    assert "valkey://host:6379" in repr(store)
    assert "secret" not in repr(store) + repr(parse_address(store.url))


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "is empty"), (b"\nx", "is empty"), (b"secret\xff", "cannot be read: it is no text")]
)
def test_a_file_without_a_password_is_an_error_when_the_store_is_opened(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    store = ValkeyStore(url="valkey://host", password_file=str(file))
    with pytest.raises(ServerError, match=reason) as failure:
        store.open(ORIGIN)
    assert "secret" not in str(failure.value)
    file.unlink()
    with pytest.raises(ServerError, match="cannot be read: No such file"):
        store.open(ORIGIN)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"password_variable": "NOT_SET"}, "valkeys://host:6379: password_variable: the environment has no 'NOT_SET'"),
        ({"password_file": "/"}, "valkeys://host:6379: password_file '/' cannot be read: Is a directory"),
        ({"tls_ca_file": "/no/ca"}, "valkeys://host:6379: tls_ca_file '/no/ca' is no file that can be read here"),
        ({"tls_certificate_file": "/no/c"}, "valkeys://host:6379: tls_certificate_file '/no/c' is no file that can"),
        (
            {"tls_certificate_file": __file__, "tls_key_file": "/no/k"},
            "valkeys://host:6379: tls_key_file '/no/k' is no file that can be read here",
        ),
    ],
)
def test_what_this_machine_lacks_is_an_error_when_the_store_is_opened(options: dict[str, Any], reason: str) -> None:
    # A stack may be checked on another machine.
    store = ValkeyStore(url="valkeys://host", **options)
    with pytest.raises(ServerError) as failure:
        store.open(ORIGIN)
    assert str(failure.value).startswith(reason)
