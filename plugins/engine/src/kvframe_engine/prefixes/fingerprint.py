"""Fingerprints of models: they tell whether saved states of one model are valid for another."""

from __future__ import annotations

import hashlib
import json

from kvframe_stores import digest_weights

from kvframe import KVCachePlan, Setup
from kvframe.contract.errors import ModelError
from kvframe.contract.model import LoadedModel


def fingerprint_of(model: LoadedModel, draft: LoadedModel | None = None) -> dict[str, str]:
    """Return hexadecimal digests of the ``config`` and ``weights`` of a model, and of its draft model if it has one.

    Digests of models that differ by accident are different, however small the difference. They give no protection
    against an attacker who makes weights for a given digest.

    Raises:
        ModelError: The adapter does not identify the model.
    """
    if draft is not None:
        own_digests, draft_digests = fingerprint_of(model), fingerprint_of(draft)
        return {
            key: hashlib.blake2b((own_digests[key] + draft_digests[key]).encode(), digest_size=32).hexdigest()
            for key in own_digests
        }
    identity = model.identity()
    if identity is None:
        raise ModelError(
            f"{model.description.name} cannot be identified: its adapter ({type(model).__name__}) has no identity(), "
            "so its prefixes can neither be saved nor loaded"
        )
    config = hashlib.blake2b(identity.config.encode(), digest_size=32).hexdigest()
    return {"config": config, "weights": digest_weights(identity.weights)}


def layout_of(plan: KVCachePlan, setup: Setup) -> str:
    """Return a hexadecimal digest of what is stored where in the pages of a plan, and of the layers' types."""
    stored = [
        {
            "layers": group.layers,
            "offsets": planned.layer_offsets,
            "page_bytes": planned.page_bytes,
            "specs": [f"{spec.kind}: {spec!r}" for spec in group.stored],
        }
        for planned, group in zip(plan.groups, setup.grouping.groups, strict=True)
    ]
    layout = json.dumps([stored, dict(setup.grouping.follows)], sort_keys=True, default=str)
    return hashlib.blake2b(layout.encode(), digest_size=32).hexdigest()
