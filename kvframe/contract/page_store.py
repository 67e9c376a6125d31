"""Page stores: keep computed pages outside of an engine, so that later requests and other engines find them.

An engine gives a store *records*, each under a key of 32 bytes. A record is a page with a seal, a keyed hash of key and
page that the engine checks when it reads the record. A key depends on the page's group, on all tokens up to the page's
end, on the model, the plan, the format and the rank, and on a secret. So a store learns nothing from a key, and needs
to know nothing about pages, groups or types: it maps keys to bytes.

An engine calls a store from a thread of its own, never from the thread that computes steps. If a store is slow, fails
or loses records, requests lose hits and nothing else.

Nothing here imports NumPy or torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

import attrs

from kvframe.contract.growth import Growing

SEAL_BYTES: Final = 32
"""The bytes of the seal, which a record has before its page."""


class OpenPageStore(Growing, ABC):
    """An open store: what ``PageStore.open`` returns.

    Its methods may block, and one thread at a time calls them. They raise any exception if the store fails: the engine
    treats the records as missing, and calls the store less often while it keeps failing.

    A store keeps these laws, which the conformance kit checks:

    * A record is found as a whole or not at all, whatever happens while it is written.
    * A key has one record for ever: if it is written again, by any engine, either record may stay.
    * A store may lose any record at any time, and has a bound of its own. What it loses, it no longer finds.
    """

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key whether ``read`` would find its record now.

        Args:
            keys: Keys of 32 bytes.
        """

    @abstractmethod
    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Sequence[bool]:
        """Copy records to buffers.

        Args:
            keys: Keys of 32 bytes.
            buffers: For each key, a writable buffer of bytes with the size of its record.

        Returns:
            For each key, whether its buffer has the record. A record of another size is none; the buffer of a record
            that was not read may have any content.
        """

    @abstractmethod
    def write(self, keys: Sequence[bytes], records: Sequence[memoryview]) -> int:
        """Keep records, and give up others if there are too many.

        Args:
            keys: Keys of 32 bytes.
            records: For each key, its record; the buffers change when this method has returned.

        Returns:
            How many of the keys have a record now.
        """

    @abstractmethod
    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove records, because the engine found that they are wrong. A key without a record is ignored.

        Args:
            keys: Keys of 32 bytes.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the store holds of this process, such as connections. The records stay."""


@attrs.frozen(kw_only=True)
class PageStore(Growing, ABC):
    """Where records are kept: the base of every store.

    A store is a frozen value; its fields are the options that a stack gives. Making one connects to nothing, and checks
    its options: a wrong one raises ``ValueError`` with a sentence.
    """

    name: ClassVar[str]
    """The registered name (``"disk"``)."""

    @abstractmethod
    def open(self, origin: str) -> OpenPageStore:
        """Open the store; called once, in the thread that will call it, and again after failures.

        Args:
            origin: 32 hexadecimal digits that engines with the same model, plan, format and rank share. Every key
                depends on it too; a store may use it to keep their records together.

        Raises:
            Exception: The store cannot be opened now; the engine tries again later.
        """

    @property
    def capacity(self) -> int | None:
        """The most bytes of records that the store keeps; None if it does not know."""
        return None

    def local_secret(self) -> bytes | None:
        """Return a secret of 32 bytes that engines which share the store share too; None for a store without one.

        Called once, when an engine starts whose stack has no ``key``. A store may keep a secret only if no
        other user than that of this process can read it.
        """
        return None
