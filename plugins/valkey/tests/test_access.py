"""Passwords, users of a server with few permissions, and TLS with certificates that the test makes."""

from __future__ import annotations

import shutil
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvframe_valkey.link import ServerError
from kvframe_valkey.store import ValkeyStore

from tests.support.store_server import StoreServer

ORIGIN, KEY = "0123456789abcdef" * 2, bytes(32)
SECRET = "pass/word of a test"
QUOTED = "pass%2Fword%20of%20a%20test"
USER_RULES = ("user", "engine", "on", f">{SECRET.replace(' ', '-')}", "~kvframe:1:*")
USER_PASSWORD = SECRET.replace(" ", "-")
COMMANDS = ("strlen", "getrange", "expire", "set", "unlink")

Start = Callable[..., StoreServer]


def use(store: ValkeyStore) -> None:
    """Write, find, read and forget a record."""
    opened = store.open(ORIGIN)
    try:
        assert 1 == opened.write([KEY], [memoryview(b"page")])
        buffer = bytearray(4)
        assert [True] == opened.find([KEY])
        assert [True] == opened.read([KEY], [memoryview(buffer)])
        assert b"page" == buffer
        opened.forget([KEY])
        assert [False] == opened.find([KEY])
    finally:
        opened.close()


def refusal_of(**options: Any) -> str:
    """Return the error of a store that cannot be opened, which must show no password."""
    with pytest.raises(ServerError) as failure:
        ValkeyStore(**{"timeout": 30, **options}).open(ORIGIN)
    report = "".join(traceback.format_exception(failure.value))
    assert not [secret for secret in (SECRET, QUOTED, USER_PASSWORD, "wrong-password") if secret in report]
    return str(failure.value)


@pytest.fixture(scope="module")
def guarded(start_server: Start) -> StoreServer:
    """Return a server with a password for the default user, and users with few permissions."""
    rules = [(*USER_RULES, *(f"+{command}" for command in COMMANDS))]
    rules += [
        ("user", f"without_{command}", *USER_RULES[2:], *(f"+{granted}" for granted in COMMANDS if granted != command))
        for command in COMMANDS
    ]
    return start_server("--requirepass", SECRET, *(text for rule in rules for text in ("--" + rule[0], *rule[1:])))


def test_the_password_is_in_the_url(guarded: StoreServer) -> None:
    use(ValkeyStore(url=f"valkey://:{QUOTED}@127.0.0.1:{guarded.port}", timeout=30))
    use(ValkeyStore(url=f"unix://:{QUOTED}@{guarded.socket}", timeout=30))


def test_the_password_is_in_the_environment(guarded: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_PASSWORD", SECRET)
    use(ValkeyStore(url=guarded.url, password_variable="STORE_PASSWORD", timeout=30))


def test_the_password_is_the_first_line_of_a_file(guarded: StoreServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\nanother line\n")
    use(ValkeyStore(url=guarded.url, password_file=str(file), timeout=30))


def test_a_wrong_or_missing_password_is_refused(guarded: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    where = f"valkey://127.0.0.1:{guarded.port} refuses the user or the password"
    assert f"{where}: Authentication required." == refusal_of(url=guarded.url)
    wrong = f"{where}: invalid username-password pair or user is disabled."
    assert wrong == refusal_of(url=f"valkey://:wrong-password@127.0.0.1:{guarded.port}")
    assert wrong == refusal_of(url=f"valkey://unknown:{QUOTED}@127.0.0.1:{guarded.port}")
    monkeypatch.setenv("STORE_PASSWORD", "wrong-password")
    assert wrong == refusal_of(url=guarded.url, user="engine", password_variable="STORE_PASSWORD")


def test_a_password_for_a_server_without_one_is_refused(server: StoreServer) -> None:
    assert "without any password configured" in refusal_of(url=f"valkey://:{QUOTED}@127.0.0.1:{server.port}")


def test_a_user_needs_five_commands_on_keys_of_the_store(guarded: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_PASSWORD", USER_PASSWORD)
    use(ValkeyStore(url=guarded.url, user="engine", password_variable="STORE_PASSWORD", timeout=30))
    use(ValkeyStore(url=f"valkey://engine:{USER_PASSWORD.replace('/', '%2F')}@127.0.0.1:{guarded.port}", timeout=30))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_user_who_may_not_use_one_of_them_is_told(
    command: str, guarded: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_PASSWORD", USER_PASSWORD)
    store = ValkeyStore(url=guarded.url, user=f"without_{command}", password_variable="STORE_PASSWORD", timeout=30)
    with pytest.raises(ServerError, match=rf"does not permit a command of the store: .*'{command}'"):
        use(store)


def test_a_database_that_does_not_exist_is_refused(server: StoreServer) -> None:
    assert "refuses a command of the store: DB index is out of range" in refusal_of(url=f"{server.url}/99")


# --- TLS --------------------------------------------------------------------------------------------------------------


class Authority:
    """An authority that signs certificates, made by the program ``openssl``."""

    def __init__(self, folder: Path) -> None:
        """Make the authority's key and certificate."""
        folder.mkdir()
        self._folder = folder
        (folder / "settings").write_text("[req]\ndistinguished_name = names\n[names]\n")
        extensions = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign"]
        self.certificate, self._key = self._make("authority", [*extensions, "subjectKeyIdentifier=hash"])

    def sign(self, name: str, alternative: str) -> tuple[Path, Path]:
        """Return the files of a certificate for a host, and of its key."""
        signer = ["-CA", str(self.certificate), "-CAkey", str(self._key)]
        extensions = ["basicConstraints=critical,CA:FALSE", "authorityKeyIdentifier=keyid", "subjectKeyIdentifier=hash"]
        return self._make(name, [*extensions, f"subjectAltName={alternative}"], *signer)

    def _make(self, name: str, extensions: list[str], *signer: str) -> tuple[Path, Path]:
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-config", str(self._folder / "settings"), "-subj", f"/CN={name}", "-days", "2"]
        command += [text for extension in extensions for text in ("-addext", extension)]
        subprocess.run([*command, "-keyout", key, "-out", certificate, *signer], check=True, capture_output=True)
        return certificate, key


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl on PATH: apt-get install openssl")
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def engine_files(authority: Authority) -> dict[str, str]:
    certificate, key = authority.sign("engine", "DNS:engine")
    return {"tls_certificate_file": str(certificate), "tls_key_file": str(key)}


def start_tls(start_server: Start, authority: Authority, name: str, alternative: str) -> StoreServer:
    certificate, key = authority.sign(name, alternative)
    return start_server(tls={"ca": authority.certificate, "certificate": certificate, "key": key})


@pytest.fixture(scope="module")
def tls_server(start_server: Start, authority: Authority) -> StoreServer:
    return start_tls(start_server, authority, "server", "IP:127.0.0.1")


@pytest.mark.parametrize("scheme", ["valkeys", "rediss"])
def test_a_server_with_tls_is_used(
    scheme: str, tls_server: StoreServer, authority: Authority, engine_files: dict[str, str]
) -> None:
    url = f"{scheme}://127.0.0.1:{tls_server.port}"
    use(ValkeyStore(url=url, tls_ca_file=str(authority.certificate), **engine_files, timeout=30))


def test_a_key_may_be_in_the_file_of_the_certificate(
    tls_server: StoreServer, authority: Authority, engine_files: dict[str, str], tmp_path: Path
) -> None:
    both = tmp_path / "both.pem"
    both.write_text("".join(Path(file).read_text() for file in engine_files.values()))
    ca = str(authority.certificate)
    use(ValkeyStore(url=tls_server.url, tls_ca_file=ca, tls_certificate_file=str(both), timeout=30))


def test_a_server_of_another_authority_is_refused(
    tls_server: StoreServer, engine_files: dict[str, str], tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    refusal = refusal_of(url=tls_server.url, tls_ca_file=str(other.certificate), **engine_files)
    assert refusal.startswith(f"valkeys://127.0.0.1:{tls_server.port} cannot be reached: ")
    assert "CERTIFICATE_VERIFY_FAILED" in refusal
    assert "CERTIFICATE_VERIFY_FAILED" in refusal_of(url=tls_server.url, **engine_files)


def test_a_certificate_of_another_host_is_refused(
    start_server: Start, authority: Authority, engine_files: dict[str, str]
) -> None:
    server = start_tls(start_server, authority, "elsewhere", "DNS:elsewhere")
    refusal = refusal_of(url=server.url, tls_ca_file=str(authority.certificate), **engine_files)
    assert "not valid for '127.0.0.1'" in refusal


def test_an_engine_without_a_certificate_is_refused_by_a_server_that_asks_for_one(
    tls_server: StoreServer, authority: Authority
) -> None:
    refusal = refusal_of(url=tls_server.url, tls_ca_file=str(authority.certificate))
    assert refusal.startswith(f"valkeys://127.0.0.1:{tls_server.port} cannot be reached: ")


def test_tls_at_one_end_only_is_an_error(tls_server: StoreServer, server: StoreServer, authority: Authority) -> None:
    refusal_of(url=f"valkey://127.0.0.1:{tls_server.port}")
    # The server waits for the rest of a command.
    url = f"valkeys://127.0.0.1:{server.port}"
    assert "did not answer within" in refusal_of(url=url, tls_ca_file=str(authority.certificate), timeout=0.3)


def test_a_certificate_that_cannot_be_read_is_an_error(tls_server: StoreServer, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    assert "cannot be reached" in refusal_of(url=tls_server.url, tls_ca_file=str(broken))
