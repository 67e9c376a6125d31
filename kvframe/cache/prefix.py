"""Prefix keys: what a block is found by.

The key of block ``i`` is the SHA-256 of block ``i - 1``'s key and the block's token ids (four bytes each, little
endian); the first block hangs on a root made of the salt and of the request's inputs, which the state of its tokens
depends on. A key therefore stands for the whole prefix up to the block's end, and for who may share it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence

from kvframe.cache.inputs import InputSequence, inputs_root, joined

_ROOT = b"kvframe prefix 1\x00"


class PrefixKeys:
    """The chain of keys of one request, for one block size, extended as its tokens become known.

    Invariant: key ``i`` depends on the salt, on the inputs and on tokens ``[0, (i + 1) * block_size)``, and on nothing
    else.
    """

    def __init__(self, block_size: int, salt: str, inputs: Mapping[str, InputSequence] | None = None) -> None:
        """Start an empty chain.

        Args:
            block_size: Tokens per block.
            salt: Requests share blocks only with requests of the same salt.
            inputs: What the request brings beside its tokens, by name.
        """
        self._block_size = block_size
        self._root = hashlib.sha256(_ROOT + joined(salt.encode(), inputs_root(inputs or {}))).digest()
        self._keys: list[bytes] = []

    def upto(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """Return the keys of the full blocks in ``token_ids[:num_tokens]``, and perhaps of later ones.

        Args:
            token_ids: The request's tokens; those that were seen before must not have changed.
            num_tokens: How many of them to cover.
        """
        size, keys = self._block_size, self._keys
        parent = keys[-1] if keys else self._root
        for start in range(len(keys) * size, num_tokens - size + 1, size):
            block = array("I", token_ids[start : start + size])
            parent = hashlib.sha256(parent + block.tobytes()).digest()
            keys.append(parent)
        return keys
