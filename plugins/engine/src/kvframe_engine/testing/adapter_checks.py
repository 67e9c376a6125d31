"""The checks of a model adapter: how it reads a model, and that the engine serves the model's own tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from kvframe_testing.checks import Check, Checks
from kvframe_testing.laws import ConformanceError

from kvframe import Stack, group_layers, load_plugins, make_layer_specs
from kvframe.contract.description import ModelDescription
from kvframe.contract.errors import KVFrameError
from kvframe.contract.model import ModelAdapter
from kvframe_engine.engine import Engine
from kvframe_engine.requests.request import SamplingParams

_NUM_TOKENS = 8
_FEW = 32
"""Token ids below this are used if a model does not say how many it has."""
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "one request at a time": {"limits": {"max_num_seqs": 1}},
    "prompts in parts": {"limits": {"max_num_batched_tokens": 5}},
    "small blocks": {"cache": {"block_size": 1}},
    "every token kept": {"cache": {"hybrid": False}},
}
"""Ways of serving that must not change a token."""


def adapter_checks(
    adapter_class: type[ModelAdapter], model: str | Path, *, name: str = "", plugins: Sequence[ModuleType] = ()
) -> Checks:
    """Return the checks of a model adapter.

    The engine compares the model with its own forward when it attaches it. Each further check serves the same prompts
    in another way, by the reference backend, and compares the tokens. So the likeliest token of the model should be far
    ahead of the next: multiply the head of a random model by about 8.

    Args:
        adapter_class: The adapter.
        model: A small model that it reads, on disk. It has no encoder.
        name: Its registered name; that of the class unless given.
        plugins: Modules of plugins that are not installed.
    """
    path = Path(model)
    checks = [
        Check(name="recognises", features=("its models",), run=partial(_check_recognises, adapter_class, path)),
        Check(
            name="describes", features=("description",), run=partial(_check_description, adapter_class, path, plugins)
        ),
        Check(
            name="serves",
            features=("the model's own forward",),
            run=partial(_check_served, adapter_class, path, plugins),
        ),
    ]
    checks += [
        Check(name=way.replace(" ", "_"), features=(way,), run=partial(_check_way, adapter_class, path, plugins, way))
        for way in _WAYS
    ]
    return Checks(part=f"model adapter {name or adapter_class.__name__!r}", checks=tuple(checks))


def _check_recognises(adapter_class: type[ModelAdapter], path: Path) -> None:
    adapter = adapter_class()
    _require(adapter.recognises(path) is True, f"recognises() does not return True for {path}")
    with tempfile.TemporaryDirectory() as folder:
        _require(adapter.recognises(Path(folder)) is False, "recognises() does not return False for an empty folder")
        (Path(folder) / "config.json").write_text("{}", encoding="utf-8")
        _require(adapter.recognises(Path(folder)) is False, "recognises() does not return False for an empty config")


def _check_description(adapter_class: type[ModelAdapter], path: Path, plugins: Sequence[ModuleType]) -> None:
    described, registry = adapter_class().describe(path), load_plugins(plugins=plugins).registry
    _require(isinstance(described, ModelDescription), f"describe() returns {type(described).__name__}")
    group_layers(make_layer_specs(described, registry, Stack(), "float32"))
    loaded = adapter_class().load(path, device="cpu", dtype="float32").description
    _require(described == loaded, "the loaded model has another description than describe() returns")


def _check_served(adapter_class: type[ModelAdapter], path: Path, plugins: Sequence[ModuleType]) -> None:
    _serve(adapter_class, path, plugins, {"engine": {"self_check": True}})


def _check_way(adapter_class: type[ModelAdapter], path: Path, plugins: Sequence[ModuleType], way: str) -> None:
    usual, other = (_serve(adapter_class, path, plugins, options) for options in ({}, _WAYS[way]))
    for index, (expected, found) in enumerate(zip(usual, other, strict=True)):
        _require(expected == found, f"with {way}, prompt {index} is continued by {found}, and otherwise by {expected}")


def _serve(
    adapter_class: type[ModelAdapter],
    path: Path,
    plugins: Sequence[ModuleType],
    options: Mapping[str, Mapping[str, Any]],
) -> list[list[int]]:
    """Return the tokens after some prompts that share a prefix."""
    attending = {layer.kind for layer in adapter_class().describe(path).layers if layer.query}
    stack = Stack.from_mapping(
        {
            "cache": {"memory": "16MiB", "block_size": 4, **options.get("cache", {})},
            "engine": {"self_check": False, **options.get("engine", {})},
            "limits": options.get("limits", {}),
            "rules": [{"kind": kind, "backend": "torch_reference", "optional": True} for kind in sorted(attending)],
        }
    )
    try:
        with Engine.from_pretrained(path, stack=stack, plugins=plugins) as engine:
            vocab_size = engine.model.description.vocab_size or _FEW
            shared = [1 + index * 7 % (vocab_size - 1) for index in range(13)]
            prompts = [[*shared, *tail] for tail in ([1], [2, 1], [], [1, 1, 1, 1])]
            outputs = engine.generate(prompts, SamplingParams(max_new_tokens=_NUM_TOKENS, ignore_eos=True))
    except KVFrameError as error:
        raise ConformanceError(str(error)) from error
    return [list(output.token_ids) for output in outputs]


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ConformanceError(f"model adapter: {otherwise}")
