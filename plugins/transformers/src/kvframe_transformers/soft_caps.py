"""Lets models attend with their soft cap in a transformers that would leave it out."""

from __future__ import annotations

from typing import Any

from kvframe_transformers.names import is_of_minor

_SOFT_CAP = "attn_logit_softcapping"


def attention_options(config: Any) -> dict[str, str]:
    """Return the options of ``from_config`` and ``from_pretrained`` by which a model attends with its soft cap.

    transformers 5.20 chooses SDPA for models with a soft cap on attention scores (Gemma 2, T5Gemma, VaultGemma), and
    leaves the cap out. 5.21 chooses eager attention for them.

    Args:
        config: The model's config.
    """
    sides = [config, *(getattr(config, name, None) for name in ("encoder", "decoder"))]
    has_cap = any(getattr(side, _SOFT_CAP, None) is not None for side in sides)
    return {"attn_implementation": "eager"} if has_cap and is_of_minor("5.20") else {}
