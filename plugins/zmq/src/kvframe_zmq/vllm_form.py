"""Events in the form of vLLM, as its indexers read them: the fields of its structs ``BlockStored`` and so on.

What it cannot express is left out: groups of inputs beside the tokens, and with them the blocks of all groups, because
vLLM's events do not say which input a block of tokens belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TOKENS = "tokens"
_MEDIA = {"device": "GPU", "host_memory": "CPU"}
_HASH_BITS = 64


class VllmForm:
    """Turns events into maps with the fields of vLLM's structs."""

    def __init__(self, *, int_hashes: bool) -> None:
        """Begin before the first event; hashes are the last 64 bits of keys as numbers, or the keys."""
        self._int_hashes = int_hashes
        self._kinds: dict[int, tuple[str, int | None]] = {}

    def events_of(self, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return those of some events that can be expressed; it may be none."""
        made: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "cleared":
                self._kinds = _kinds_of(event["layout"]["groups"])
                made.append({"type": "AllBlocksCleared"})
            elif event.get("group") not in self._kinds:
                continue
            elif event["type"] == "stored":
                made.append(self._stored(event))
            elif event["type"] == "removed":
                made.append(
                    {
                        "type": "BlockRemoved",
                        "block_hashes": [self._hash_of(key) for key in event["keys"]],
                        "medium": _MEDIA[event["medium"]],
                        "group_idx": event["group"],
                    }
                )
        return made

    def _stored(self, event: Mapping[str, Any]) -> dict[str, Any]:
        kind, window = self._kinds[event["group"]]
        parent = event["parent"] if event["start"] else None
        salt, is_first = event["salt"], event["start"] == 0
        others = [None] * (len(event["keys"]) - 1)
        return {
            "type": "BlockStored",
            "block_hashes": [self._hash_of(key) for key in event["keys"]],
            "parent_block_hash": None if parent is None else self._hash_of(parent),
            "token_ids": event["tokens"],
            "block_size": event["block_size"],
            "lora_id": None,
            "medium": _MEDIA[event["medium"]],
            "lora_name": None,
            # As vLLM, which tells the salt with the first block of a request.
            "extra_keys": [(salt,), *others] if salt and is_first else None,
            "group_idx": event["group"],
            "kv_cache_spec_kind": kind,
            "kv_cache_spec_sliding_window": window,
        }

    def _hash_of(self, key: bytes) -> int | bytes:
        return int.from_bytes(key, "big") & ((1 << _HASH_BITS) - 1) if self._int_hashes else key


def _kinds_of(groups: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, int | None]]:
    """Return vLLM's word for what each group needs, and its window; no group if one is of an input."""
    if any(group["sequence"] != TOKENS for group in groups):
        return {}
    return {group["group"]: _kind_of(group["need"]) for group in groups}


def _kind_of(need: Mapping[str, Any]) -> tuple[str, int | None]:
    if need["deaths"] or (need["first"] and need["chunk"]):
        return "unknown", None
    if need["chunk"] is not None:
        return "chunked_local_attention", None
    if need["last"] is not None:
        return ("unknown", None) if need["first"] else ("sliding_window", need["last"] + 1)
    return "full_attention", None
