"""Models that get draft tokens, and what they generate without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
from kvframe_engine.scheduling.stats import EngineStats

from kvframe import RequestOutput, SamplingParams, load_plugins
from tests.models.serving import TinyModel

OF_EXPERTS = ("gpt_oss", "deepseek_v3", "mixtral", "jamba", "qwen3_next")
"""Families whose experts torch multiplies in float32 at most."""


def models_with(
    folder: Path, manifest: ModuleType, change: Callable[[TinyModel], object] = lambda model: None
) -> Callable[..., TinyModel]:
    """Return a function that makes a tiny model of a family, once, with the plugins of a manifest.

    In float64, no two tokens are as close as rounding, which differs by batch and by machine. ``change`` is given each
    saved model.
    """
    registry = load_plugins(plugins=[manifest]).registry

    @cache
    def model(family: str, dtype: str | None = None) -> TinyModel:
        saved = TinyModel.save(folder / f"{family}-{dtype}", family)
        change(saved)
        return attrs.evolve(saved, registry=registry).in_dtype(
            dtype or ("float32" if family in OF_EXPERTS else "float64")
        )

    return model


def shown(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [(output.token_ids, output.text, output.finish_reason) for output in outputs]


_GENERATED: dict[str, tuple[list[RequestOutput], EngineStats]] = {}


def generated(
    model: TinyModel, params: SamplingParams, prompts: Sequence[Any], **options: Any
) -> tuple[list[RequestOutput], EngineStats]:
    """Return what a model generates without drafts, and the statistics; computed once."""
    key = f"{model.path} {model.dtype} {params} {prompts} {options}"
    if key not in _GENERATED:
        with model.engine(**options) as engine:
            _GENERATED[key] = engine.generate(prompts, params), engine.stats()
    return _GENERATED[key]
