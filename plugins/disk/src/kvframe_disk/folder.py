"""The folder: where its files are, the lock of its writers, and its secret."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LAYOUT = "kvframe-pages-1"
"""The name of the folder in the operator's folder. A later layout of files has another number."""

SECRET_BYTES = 32
_VERSION_BYTES = 16


def read_version(lock: int) -> bytes:
    """Return the version of the folder that the open file of its lock has; none if nothing was ever changed."""
    return os.pread(lock, _VERSION_BYTES, 0)


def write_version(lock: int) -> bytes:
    """Give the folder a version that it never had."""
    version = secrets.token_bytes(_VERSION_BYTES)
    os.pwrite(lock, version, 0)
    return version


class Folder:
    """The store's folder in the operator's folder.

    Attributes:
        root: The store's folder; only its owner can list it.
        records: The folder of the batch files that are complete.
        writing: The folder of the batch files that are being written.
    """

    def __init__(self, path: Path) -> None:
        self.root = Path(os.path.abspath(path.expanduser())) / LAYOUT
        self.records = self.root / "records"
        self.writing = self.root / "writing"
        self._lock = self.root / "lock"
        self._secret = self.root / "secret"

    def make(self) -> None:
        """Make the folder if it does not exist."""
        with self.explained("cannot be made"):
            self.root.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.root, self.records, self.writing):
                folder.mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the lock that all processes take which publish or remove batch files; the value is its open file."""
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield lock
            finally:
                # Closing would not be enough: a process that was forked meanwhile shares the lock.
                fcntl.flock(lock, fcntl.LOCK_UN)
        finally:
            os.close(lock)

    def version(self) -> bytes | None:
        """Return the content of the lock's file, which differs after each change; None if the folder was removed."""
        try:
            lock = os.open(self._lock, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return read_version(lock)
        finally:
            os.close(lock)

    def secret(self) -> bytes:
        """Return the folder's secret of 32 bytes; the first caller of all processes draws it."""
        self.make()
        with self.explained("has no usable secret"):
            if not self._secret.exists():
                self._draw_secret()
            file = os.open(self._secret, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                status = os.fstat(file)
                secret = os.read(file, SECRET_BYTES + 1)
            finally:
                os.close(file)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(
                f"other users can read the secret of stored pages, {self._secret}: give it to one user alone "
                f"(chmod 600), remove it together with the stored pages, or set [cache] key"
            )
        if len(secret) != SECRET_BYTES:
            raise OSError(
                f"the secret of stored pages, {self._secret}, has the wrong length: remove it, and later requests "
                "compute the stored prefixes again"
            )
        return secret

    def _draw_secret(self) -> None:
        draft = self.root / f"secret-{secrets.token_hex(8)}"
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(secrets.token_bytes(SECRET_BYTES))
                stream.flush()
                os.fsync(file)
            # A link is made once: of several processes, all read the secret of the first.
            with suppress(FileExistsError):
                os.link(draft, self._secret)
        finally:
            draft.unlink(missing_ok=True)

    @contextmanager
    def explained(self, problem: str) -> Iterator[None]:
        """Raise an ``OSError`` again as one sentence that names the folder and what failed."""
        try:
            yield
        except OSError as error:
            file = f" ({error.filename})" if error.filename not in (None, str(self.root)) else ""
            raise type(error)(f"the folder of stored pages, {self.root}, {problem}: {error.strerror}{file}") from error
