"""Records: pages as page stores keep them, under keys that reveal nothing, with seals that no store can forge.

A record is a seal of 32 bytes and a page. The key of a record is the keyed BLAKE2b (RFC 7693) of its *origin*, which
engines with the same model, plan, format and rank share, of its group, and of the key of its page
(``kvframe.cache.events``). The seal is the keyed BLAKE2b of key and page. So a store that returns other bytes than it
was given, or those of another key, is found out.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from hmac import compare_digest

from kvframe.contract.page_store import SEAL_BYTES

KEY = b"kvframe.record.1"
SEAL = b"kvframe.seal...1"


class PageRecords:
    """Makes keys and seals of records for one origin."""

    def __init__(self, secret: bytes, origin: Iterable[str]) -> None:
        """Begin with a secret of 32 bytes, and the texts that tell pages of other models, plans and ranks apart.

        ``origin`` becomes 32 hexadecimal digits: the origin that stores are opened with.
        """
        digest = blake2b(digest_size=16, key=secret, person=b"kvframe.origin.1")
        for text in origin:
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        self.origin = digest.hexdigest()
        self._key = blake2b(digest.digest(), key=secret, person=KEY, digest_size=32)
        self._seal = blake2b(key=secret, person=SEAL, digest_size=SEAL_BYTES)

    def key_of(self, group: int, page_key: bytes) -> bytes:
        """Return the key of the record of a page: 32 bytes."""
        digest = self._key.copy()
        digest.update(group.to_bytes(4, "little") + page_key)
        return digest.digest()

    def seal(self, record_key: bytes, page: memoryview) -> bytes:
        """Return the seal of a page under a key."""
        digest = self._seal.copy()
        digest.update(record_key)
        digest.update(page)
        return digest.digest()

    def is_sound(self, record_key: bytes, record: memoryview) -> bool:
        """Return whether a record is one that was sealed under this key."""
        return compare_digest(self.seal(record_key, record[SEAL_BYTES:]), bytes(record[:SEAL_BYTES]))
