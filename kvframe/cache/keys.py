"""Keys of prefixes and inputs for other processes: keyed hashes that every process with the same secret computes alike.

Inside the cache tokens are compared, and nothing is hashed. Outside, the first ``n`` tokens of a request have the key
BLAKE2b (RFC 7693), keyed, of ``joined(salt, inputs)`` and then each token id as four bytes, little-endian: 32 bytes
from which nothing can be learnt without the secret. The key depends on the prefix alone, not on a block size.

The content of an input has the key BLAKE2b, keyed, of the hash that its model adapter gives: in the cache, within the
keys of prefixes, and in files of saved prefixes. The first ``n`` tokens of an input have the key of its salt, its name,
its content's key, its number of tokens, and ``n``, ``joined``; numbers are eight bytes, little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from kvframe.cache.input_index import InputBlocks, InputSequence, inputs_root, joined

KEY_BYTES = 32
# BLAKE2b's ``person``: the purpose of a key, with the version of its definition.
PREFIX = b"kvframe.prefix.1"
INPUT = b"kvframe.inputs.1"
CONTENT = b"kvframe.content1"

NO_INPUTS: Mapping[str, InputSequence] = MappingProxyType({})


class PrefixHash:
    """The hash of a prefix that grows; ``num_tokens`` counts its tokens so far."""

    __slots__ = ("_hash", "num_tokens")

    def __init__(self, secret: bytes, salt: str, inputs: bytes) -> None:
        """Begin without a token; ``inputs`` is what ``inputs_root`` returns."""
        self._hash = blake2b(joined(salt.encode(), inputs), digest_size=KEY_BYTES, key=secret, person=PREFIX)
        self.num_tokens = 0

    def add_tokens(self, tokens: npt.NDArray[np.uint32]) -> bytes:
        """Append tokens, ``[n], uint32, host``, and return the key of all tokens."""
        self._hash.update(tokens.astype("<u4", copy=False).data)
        self.num_tokens += len(tokens)
        return self._hash.digest()

    def copy(self) -> PrefixHash:
        """Return a hash of the same tokens that grows by itself."""
        other = object.__new__(PrefixHash)
        other._hash, other.num_tokens = self._hash.copy(), self.num_tokens
        return other


def prefix_key(
    secret: bytes, token_ids: Sequence[int], *, salt: str = "", inputs: Mapping[str, InputSequence] = NO_INPUTS
) -> bytes:
    """Return the key of a prefix, 32 bytes.

    Args:
        secret: 32 bytes: the stack's ``[cache] key``.
        token_ids: The tokens of the prefix: those of whole blocks, for the key of a block.
        salt: The request's ``cache_salt``.
        inputs: The request's inputs beside its tokens, by the name of the sequence.
    """
    return PrefixHash(secret, salt, inputs_root(inputs)).add_tokens(np.fromiter(token_ids, dtype=np.uint32))


def content_key(secret: bytes, content: bytes) -> bytes:
    """Return the key of an input's content, 32 bytes: the ``key`` of its ``InputSequence``.

    Args:
        secret: 32 bytes: the stack's ``[cache] key``.
        content: The content's hash, as the model adapter makes it (``ModelInput.key``).
    """
    return blake2b(content, digest_size=KEY_BYTES, key=secret, person=CONTENT).digest()


def input_key(secret: bytes, blocks: InputBlocks, num_tokens: int) -> bytes:
    """Return the key of the first tokens of an input, 32 bytes: those of whole blocks, or all for its last block."""
    numbers = (number.to_bytes(8, "little") for number in (blocks.num_tokens, num_tokens))
    message = joined(blocks.salt.encode(), blocks.sequence.encode(), blocks.key, *numbers)
    return blake2b(message, digest_size=KEY_BYTES, key=secret, person=INPUT).digest()
