"""Input sequences: what a request brings beside its own tokens, such as what its encoder reads.

An input is whole before the first token is computed and stays as it is. Its blocks live for as long as the request
runs, and are found by content: requests with the same input hold them once. The key of block ``i`` is the SHA-256 of a
root, the salt, the input's key and length, and ``i``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import attrs

from kvframe.plan import PlannedGroup

_ROOT = b"kvframe input 1\x00"


@attrs.frozen
class InputSequence:
    """One input of a request.

    Attributes:
        num_tokens: Its tokens, at least one.
        key: A hash of its content, and of whatever else decides its state: inputs of equal key and length are the same.
    """

    num_tokens: int = attrs.field(validator=attrs.validators.ge(1))
    key: bytes


@attrs.frozen
class InputBlocks:
    """The blocks of one input of a request in one group.

    Attributes:
        group: The group's index.
        sequence: Which input it is (``"encoder"``).
        num_tokens: Its tokens.
        num_blocks: Blocks that hold all of it.
        keys: What each of them is found by; empty where blocks are not cached.
    """

    group: int
    sequence: str
    num_tokens: int
    num_blocks: int
    keys: tuple[bytes, ...]


def input_blocks(
    groups: Iterable[PlannedGroup], inputs: Mapping[str, InputSequence], salt: str, *, are_cached: bool
) -> tuple[InputBlocks, ...]:
    """Return a request's blocks in the groups that keep state of its inputs.

    Args:
        groups: The groups of input sequences.
        inputs: The request's inputs, by name.
        salt: Requests share blocks only with requests of the same salt.
        are_cached: Whether blocks can be found by their content.
    """
    found = []
    for group in groups:
        sequence = inputs.get(group.spec.sequence)
        if sequence is not None:
            num_blocks = -(-sequence.num_tokens // group.block_size)
            root = hashlib.sha256(_ROOT + joined(salt.encode(), sequence.key, _number(sequence.num_tokens))).digest()
            keys = (hashlib.sha256(root + _number(index)).digest() for index in range(num_blocks if are_cached else 0))
            found.append(InputBlocks(group.index, group.spec.sequence, sequence.num_tokens, num_blocks, tuple(keys)))
    return tuple(found)


def inputs_root(inputs: Mapping[str, InputSequence]) -> bytes:
    """Return what stands for all inputs of a request, by name and content; nothing for no inputs."""
    return b"".join(
        joined(name.encode(), inputs[name].key, _number(inputs[name].num_tokens)) for name in sorted(inputs)
    )


def joined(*parts: bytes) -> bytes:
    """Return parts as one, so that no other parts give the same."""
    return b"".join(_number(len(part)) + part for part in parts)


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
