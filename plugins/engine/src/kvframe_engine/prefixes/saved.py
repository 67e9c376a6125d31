"""Saves cached prefixes to a file, and loads them in another process."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe import KVCacheManager, KVCachePlan, KVCacheStorage, Pin, Setup
from kvframe.contract.errors import RequestError, shown
from kvframe_engine.contract.errors import PrefixFileError
from kvframe_engine.pool_pages import PoolPages
from kvframe_engine.prefixes.file_format import FilePrefix, Offsets
from kvframe_engine.prefixes.file_reader import PrefixFileReader
from kvframe_engine.prefixes.file_writer import PrefixFileWriter
from kvframe_engine.prefixes.fingerprint import layout_of
from kvframe_engine.prefixes.of_prompts import PromptPrefixes
from kvframe_engine.requests.admission import check_salt
from kvframe_engine.requests.prompt import AnyPrompt, salt_of_each

_A_KEY = "64 hexadecimal digits or a file of them"
_BYTES_AT_ONCE = 16 << 20
"""The bytes of pages that are copied at once between pool and file; at least one page is copied."""


@attrs.frozen(kw_only=True)
class SavedPrefix:
    """A prefix after saving or loading.

    Attributes:
        num_tokens: Its number of tokens: those of the whole blocks of its prompt.
        token_ids: Its tokens; ``[num_tokens]``.
        cache_salt: The salt of the requests that find it.
        is_cached: Whether it is in the cache now.
        reason: One sentence that says why it is not cached; None if it is.
    """

    num_tokens: int
    token_ids: Sequence[int]
    cache_salt: str
    is_cached: bool = True
    reason: str | None = None


def checked_path(path: Any, code: str) -> Path:
    """Return the path of a file; raise ``PrefixFileError`` if it is not a path.

    Args:
        path: The value that the user gave.
        code: The error's code.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path):
        raise PrefixFileError(f"a file of prefixes is named by a path, not by {shown(path)}", code=code)
    return Path(path)


class PrefixFiles:
    """Writes and reads files of an engine's prefixes."""

    def __init__(
        self,
        manager: KVCacheManager,
        prefixes: PromptPrefixes,
        setup: Setup,
        storage: KVCacheStorage,
        fingerprint: Callable[[], Mapping[str, str]],
        vocab_size: int | None,
        shared_secret: bytes | None,
        let_through: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Work on an engine's cache.

        Args:
            manager: The cache manager.
            prefixes: Computes the prefixes that are saved.
            setup: What the stack does with the model.
            storage: The bytes of the pages.
            fingerprint: Returns the digests that identify the model.
            vocab_size: Token ids are below it; None if unknown.
            shared_secret: The secret of the keys of inputs; None if no other process knows it.
            let_through: Returns a context manager that lets interrupts through while weights, pages and files are read
                or written.
        """
        self._let_through = let_through
        self._manager = manager
        self._prefixes = prefixes
        self._setup = setup
        self._pool = PoolPages(storage)
        self._fingerprint = fingerprint
        self._vocab_size = vocab_size
        self._key = None if shared_secret is None else _secret_check(shared_secret)

    @property
    def _plan(self) -> KVCachePlan:
        return self._manager.plan

    # --- saving -------------------------------------------------------------------------------------------------------

    def save(self, path: Path, prompts: Sequence[AnyPrompt], cache_salt: str | Sequence[str]) -> list[SavedPrefix]:
        """Compute prompts' prefixes if they are not cached, and write them to a file."""
        self._prefixes.check_caching()
        salts = salt_of_each(cache_salt, len(prompts))
        prefixes = [self._prefixes.of(prompt, salt) for prompt, salt in zip(prompts, salts, strict=True)]
        has_inputs = any(prefix.inputs for prefix in prefixes)
        if has_inputs and self._key is None:
            raise PrefixFileError(
                f"{path} cannot hold prompts with an input for an encoder, because no other process has the secret of "
                f"the keys of inputs; set key in the [cache] of both engines' stacks, to {_A_KEY}",
                code="no_key",
            )
        saved = []
        with self._let_through():
            origin = {**self._origin(), "key": self._key if has_inputs else None}
        with PrefixFileWriter(path, origin) as file:
            for prefix in prefixes:
                self._prefixes.compute(prefix)
                # No request runs until the file is written.
                pin = self._manager.pin(prefix.token_ids, salt=prefix.salt, inputs=prefix.inputs, checks_capacity=False)
                try:
                    pages = [self._read_pages(group, ids[ids != 0]) for group, ids in enumerate(pin.blocks)]
                    token_ids = array("I", prefix.token_ids[: pin.num_tokens])
                    with self._let_through():
                        file.add(token_ids, prefix.salt, prefix.inputs, pages)
                finally:
                    self._manager.unpin(pin)
                saved.append(SavedPrefix(num_tokens=len(token_ids), token_ids=token_ids, cache_salt=prefix.salt))
            file.finish()
        return saved

    def _read_pages(self, group: int, block_ids: npt.NDArray[np.int32]) -> Iterator[bytes]:
        """Yield the bytes of pages, copied from the device many at a time."""
        at_once = max(1, _BYTES_AT_ONCE // self._plan.groups[group].page_bytes)
        for start in range(0, len(block_ids), at_once):
            for page in self._pool.read(group, block_ids[start : start + at_once].tolist()).numpy():
                yield page.tobytes()

    # --- loading ------------------------------------------------------------------------------------------------------

    def load(self, path: Path, salt: str | None) -> list[SavedPrefix]:
        """Load the prefixes of a file into the cache, as many as fit."""
        self._prefixes.check_caching()
        if salt is not None:
            check_salt(salt)
        with PrefixFileReader(path) as file:
            with self._let_through():
                self._check_origin(file)
                file.check()
                self._check_prefixes(file)
                self._check_key(file)
            if not self._manager.num_free_rows:
                raise RequestError(
                    "max_num_seqs requests are running, and no row is free; load prefixes after one has ended",
                    code="busy",
                )
            return self._load(file, salt)

    def _load(self, file: PrefixFileReader, salt: str | None) -> list[SavedPrefix]:
        pins: list[Pin] = []
        loaded = []
        try:
            for index, prefix in enumerate(file.prefixes):
                prefix_salt, reason, token_ids = prefix.salt if salt is None else salt, None, array("I")
                if self._is_too_long(prefix):
                    longest = self._plan.max_model_len
                    reason = f"it, or an input of it, is longer than a request can be here ({longest} tokens)"
                else:
                    token_ids = array("I", file.tokens(index).tobytes())
                    reason = self._load_one(file, index, token_ids, prefix_salt, pins)
                loaded.append(
                    SavedPrefix(
                        num_tokens=prefix.num_tokens,
                        token_ids=token_ids,
                        cache_salt=prefix_salt,
                        is_cached=reason is None,
                        reason=reason,
                    )
                )
        finally:
            # No block of a prefix may be evicted for a later prefix. After this, the first prefix is evicted last.
            for pin in reversed(pins):
                self._manager.unpin(pin)
        return loaded

    def _load_one(
        self, file: PrefixFileReader, index: int, token_ids: Sequence[int], salt: str, pins: list[Pin]
    ) -> str | None:
        """Load and pin a prefix; return the reason if it cannot be loaded, or None."""
        prefix = file.prefixes[index]
        pin = self._manager.restore(
            token_ids,
            lambda group, blocks, block_ids: self._write_pages(
                file, group, file.offsets(index)[group][np.searchsorted(self._blocks(group, prefix), blocks)], block_ids
            ),
            salt=salt,
            inputs=prefix.inputs,
        )
        if pin is None:
            return (
                "the cache has too few free blocks for it beside the earlier prefixes and the running requests; give "
                "it more memory"
            )
        pins.append(pin)
        return None

    def _blocks(self, group: int, prefix: FilePrefix) -> list[int]:
        """Return the blocks of a group that a request needs to continue after a prefix."""
        planned = self._plan.groups[group]
        if planned.is_of_input:
            input_sequence = prefix.inputs.get(planned.spec.sequence)
            return [] if input_sequence is None else list(range(-(-input_sequence.num_tokens // planned.block_size)))
        live = planned.answers.live_blocks(prefix.num_tokens) if prefix.num_tokens else ()
        return [block for start, stop in live for block in range(start, stop)]

    def _write_pages(self, file: PrefixFileReader, group: int, offsets: Offsets, block_ids: Sequence[int]) -> None:
        """Copy pages of a file to the device, many at a time."""
        page_bytes = self._plan.groups[group].page_bytes
        at_once = max(1, _BYTES_AT_ONCE // page_bytes)
        for start in range(0, len(offsets), at_once):
            offsets_of_part = offsets[start : start + at_once].tolist()
            staged = torch.empty((len(offsets_of_part), page_bytes), dtype=torch.uint8)
            with self._let_through():
                for offset, page in zip(offsets_of_part, staged.numpy(), strict=True):
                    file.read_page(offset, memoryview(page))
            self._pool.write(group, block_ids[start : start + at_once], staged)

    # --- checks of a file ---------------------------------------------------------------------------------------------

    def _origin(self) -> dict[str, Any]:
        """Return the properties that must be equal in the engine that loads the prefixes."""
        return {
            **self._fingerprint(),
            "groups": [_summary(planned) for planned in self._plan.groups],
            "layout": layout_of(self._plan, self._setup),
        }

    def _check_origin(self, file: PrefixFileReader) -> None:
        own_origin, file_origin = self._origin(), file.origin
        if file_origin.get("config") != own_origin["config"]:
            raise PrefixFileError(f"{file.path} was saved from another model: its config differs", code="other_model")
        if file_origin.get("weights") != own_origin["weights"]:
            raise PrefixFileError(
                f"{file.path} was saved from a model with this config and other weights", code="other_model"
            )
        if file_origin.get("groups") != own_origin["groups"] or file_origin.get("layout") != own_origin["layout"]:
            raise PrefixFileError(
                f"{file.path} was saved from a cache with other pages: "
                f"{_differing(file_origin.get('groups'), own_origin)}",
                code="other_cache",
            )

    def _check_prefixes(self, file: PrefixFileReader) -> None:
        """Raise for a file with prefixes that this model and cache cannot have, before anything is loaded."""
        groups = self._plan.groups
        for index, prefix in enumerate(file.prefixes):
            if prefix.num_tokens % self._plan.alignment or not (prefix.num_tokens or prefix.inputs):
                raise self._damaged(file, f"a prefix has {prefix.num_tokens} tokens, which are not whole blocks")
            if not prefix.inputs.keys() <= self._plan.max_input_lens.keys() or len(prefix.num_pages) != len(groups):
                raise self._damaged(file, "a prefix has an input or a group that the model does not have")
            if self._is_too_long(prefix):
                # Such a prefix is neither read nor loaded, because its size has no limit.
                continue
            if tuple(len(self._blocks(group.index, prefix)) for group in groups) != prefix.num_pages:
                raise self._damaged(file, "a prefix has other pages than it needs")
            if self._vocab_size is not None and (file.tokens(index) >= self._vocab_size).any():
                raise self._damaged(file, f"it has token ids outside of [0, {self._vocab_size}), the model's")
            for group, offsets in zip(groups, file.offsets(index), strict=True):
                last = file.num_page_bytes - group.page_bytes
                if len(offsets) and (last < 0 or int(offsets.max()) > last):
                    raise self._damaged(file, "a page lies after the end of its pages")

    def _check_key(self, file: PrefixFileReader) -> None:
        """Raise for a file whose inputs have keys of another secret, because no request would find them."""
        if not any(prefix.inputs for prefix in file.prefixes):
            return
        if self._key is None:
            raise PrefixFileError(
                f"{file.path} names its prompts' inputs for an encoder by keys, and this stack has no secret for them; "
                f"set key in its [cache], {_A_KEY}, to that of the stack that saved the file",
                code="no_key",
            )
        if file.origin.get("key") != self._key:
            raise PrefixFileError(
                f"{file.path} names its prompts' inputs for an encoder by keys of another secret; set key in the "
                "stack's [cache] to that of the stack that saved the file",
                code="other_key",
            )

    def _is_too_long(self, prefix: FilePrefix) -> bool:
        longest = self._plan.max_input_lens
        return prefix.num_tokens > self._plan.max_model_len or any(
            value.num_tokens > longest[name] for name, value in prefix.inputs.items()
        )

    @staticmethod
    def _damaged(file: PrefixFileReader, why: str) -> PrefixFileError:
        return PrefixFileError(f"{file.path} is damaged: {why}", code="damaged")


def _secret_check(secret: bytes) -> str:
    """Return a value that tells secrets apart and reveals nothing: the keyed BLAKE2b of no bytes, in hexadecimal."""
    return hashlib.blake2b(digest_size=32, key=secret, person=b"kvframe.checks.1").hexdigest()


def _summary(planned: Any) -> dict[str, Any]:
    """Return a summary of a group's pages, for error texts."""
    spec = planned.spec
    return {
        "kind": spec.kind,
        "block_size": spec.block_size,
        "dtypes": sorted({tensor.dtype for tensor in spec.state_tensors().values()}),
        "format": spec.kv_format.name,
        "layers": len(planned.layers),
        "page_bytes": planned.page_bytes,
    }


def _differing(file_groups: Any, own_origin: Mapping[str, Any]) -> str:
    """Return a text that names the first difference between the groups of a file and those of a cache."""
    if not isinstance(file_groups, list) or len(file_groups) != len(own_origin["groups"]):
        return "it has other groups"
    for index, (file_group, own_group) in enumerate(zip(file_groups, own_origin["groups"], strict=True)):
        for key, value in own_group.items():
            if not isinstance(file_group, dict) or file_group.get(key) != value:
                was = file_group.get(key) if isinstance(file_group, dict) else file_group
                return f"group {index} has {key} {was!r} there and {value!r} here"
    return "its layers lie in other places, or have other parameters"
