"""Runs the plugins of a frozen version, in a process of its own: loads them, checks them by the kit, serves a model.

``python -m tests.frozen.run_plugins`` uses this kvframe; with ``--newer``, one that stands for the next minor version:
with another hook, another argument of the hooks that register names, another field and another extension of the batch
metadata, and what ``newer`` adds to backends and specs. It deprecates a hook that the plugins implement.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

SPEC = {"layers": "layers.0", "spec": {"kind": "frozen_spec", "chunk": 8}}
STACK: dict[str, Any] = {
    "cache": {"memory": "1MiB", "block_size": 4, "eviction": "frozen_eviction"},
    "model": {"drafts": "frozen_proposer"},
    "rules": [{"layers": "*", "backend": "frozen_backend", "wrappers": ["frozen_wrapper"]}, SPEC],
}


DEPRECATED = "kvframe_register_proposers"
"""The hook that the newer version deprecates."""


def become_newer() -> None:
    """Make this process's kvframe one of the next minor version. Called before anything else of it is imported."""
    import attrs

    from tests.frozen.newer import change_source

    change_source()
    from kvframe.contract import hookspecs, metadata

    major, minor = hookspecs.API_VERSION.split(".")
    hookspecs.API_VERSION = f"{major}.{int(minor) + 1}"

    def kvframe_register_later_parts(self: Any, register: Any) -> None:
        """Register parts that this version does not have."""

    def registering(name: str) -> Any:
        def with_one_more(self: Any, register: Any, later: str) -> None:
            """Take one more argument."""

        with_one_more.__name__ = name
        with_one_more.__qualname__ = f"HookSpecs.{name}"  # pluggy leaves out the self of methods
        if name != DEPRECATED:
            return hookspecs.hookspec(with_one_more)
        return hookspecs.hookspec(with_one_more, warn_on_impl=DeprecationWarning(f"{name} is deprecated"))

    for name in [each for each in vars(hookspecs.HookSpecs) if each.startswith("kvframe_register_")]:
        setattr(hookspecs.HookSpecs, name, registering(name))
    kvframe_register_later_parts.__qualname__ = "HookSpecs.kvframe_register_later_parts"
    later = hookspecs.hookspec(kvframe_register_later_parts)
    vars(hookspecs)["HookSpecs"].kvframe_register_later_parts = later  # type: ignore[attr-defined]

    @attrs.frozen(kw_only=True, eq=False)
    class Later(metadata.CommonAttentionMetadata):
        later_field: int = 0

    vars(metadata)["CommonAttentionMetadata"] = Later
    add_extension()
    from kvframe.loading import plugins

    call = plugins._call

    @functools.wraps(call)
    def call_with_one_more(manager: Any, hook: str, **arguments: Any) -> Any:
        return call(manager, hook, **arguments, **({"later": "later"} if "register" in arguments else {}))

    vars(plugins)["_call"] = call_with_one_more


def add_extension() -> None:
    """Give every step an extension that no plugin knows."""
    import attrs
    import torch

    from kvframe.attention import batch_metadata, wrapping
    from kvframe.contract.metadata import Axis, Extension

    values = torch.zeros(1)

    @attrs.frozen(kw_only=True, eq=False, slots=False)
    class LaterBatch(batch_metadata.StepBatch):
        extensions: Any = attrs.field(factory=lambda: {"later": Extension(values, Axis.STEP, values, optional=True)})

    vars(batch_metadata)["StepBatch"] = LaterBatch
    apply = wrapping.apply_wrapper

    @functools.wraps(apply)
    def noting(wrapper: Any, metadata: Any, *arguments: Any) -> Any:
        made = apply(wrapper, metadata, *arguments)
        EXTENSIONS.add(("later" in metadata.extensions, "later" in made.extensions))
        return made

    vars(wrapping)["apply_wrapper"] = noting


EXTENSIONS: set[tuple[bool, bool]] = set()
"""Whether a wrapper was applied to a step with the extension, and whether its result has it."""


def check_parts(*, newer: bool) -> dict[str, list[str]]:
    """Return the failures of each part, by the kit of this kvframe."""
    from kvframe_engine.testing.proposers import proposer_checks
    from kvframe_testing.backend_checks import backend_checks
    from kvframe_testing.checks import run_checks
    from kvframe_testing.eviction import policy_checks
    from kvframe_testing.formats import format_checks
    from kvframe_testing.spec_checks import spec_checks
    from kvframe_testing.wrappers import wrapper_checks

    from kvframe import load_plugins

    host = load_plugins()
    registry = host.registry
    backend = backend_checks(registry.backends.load("frozen_backend"))
    wrapper = wrapper_checks(registry.wrappers.load("frozen_wrapper"))
    if newer:
        # The kit of a later version asks a wrapper of that version to declare the later field.
        wrapper = wrapper.only("attention-*")
        backend = backend.only("full-*")  # the other masks are computed beside this kvframe
    checks = {
        "backend": backend,
        "spec": spec_checks(registry.specs.load("frozen_spec")),
        "wrapper": wrapper,
        "format": format_checks(registry.formats.load("frozen_format")).only("*-float32-*"),
        "eviction": policy_checks(registry.eviction_policies.load("frozen_eviction")),
        "proposer": proposer_checks(registry.proposers.load("frozen_proposer")),
    }
    found = {kind: [*run_checks(each).failures.values()] for kind, each in checks.items()}
    status = host.record("frozen")
    return {**found, "loading": [] if status.status == "loaded" else [f"{status.status}: {status.reason}"]}


def serve_a_model() -> dict[str, Any]:
    """Return whether the frozen parts serve the frozen adapter's model, with the tokens of kvframe's own parts."""
    import torch
    from kvframe_engine import adapter_checks
    from kvframe_frozen.adapter import FrozenAdapter
    from kvframe_frozen.model import Model
    from kvframe_testing.checks import run_checks

    from kvframe import Engine, SamplingParams, Stack

    config = {"vocab_size": 64, "size": 32, "num_heads": 2, "num_layers": 2, "max_model_len": 128}
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model(**config)
    with torch.no_grad():
        model.head.weight *= 8

    def generate(path: Path, tables: dict[str, Any]) -> tuple[list[Any], int]:
        with Engine.from_pretrained(path, stack=Stack.from_mapping(tables)) as engine:
            prompts = [[*range(3, 40)], [5, 6, 7], [*range(3, 30), 9]]
            outputs = engine.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
            return [list(output.token_ids) for output in outputs], engine.stats().draft_tokens

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        torch.save(model.state_dict(), Path(folder) / "weights.pt")
        plain = {"cache": {"memory": "1MiB", "block_size": 4}, "rules": [{"layers": "*", "backend": "torch_reference"}]}
        expected, _ = generate(Path(folder), {**plain, "rules": [*plain["rules"], SPEC]})  # type: ignore[misc]
        found, num_drafts = generate(Path(folder), STACK)
        formatted = {**STACK, "cache": {**STACK["cache"], "format": "frozen_format"}}
        formatted["rules"] = [{"layers": "*", "backend": "torch_reference"}]
        generate(Path(folder), formatted)
        adapter = adapter_checks(FrozenAdapter, folder, name="frozen_adapter")
        failures = [*run_checks(adapter).failures.values()]
    return {"equal": found == expected, "drafts": num_drafts, "failures": failures}


def main() -> None:
    """Print what was found, as JSON."""
    newer = "--newer" in sys.argv
    if newer:
        become_newer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", f"{DEPRECATED} is deprecated", DeprecationWarning)
        failures = check_parts(newer=newer)
        model = serve_a_model()
    from kvframe_testing.case import Request
    from kvframe_testing.metadata import make_metadata

    from kvframe.contract import hookspecs
    from kvframe.loading.plugins import _HOOKS

    found = {
        "api": hookspecs.API_VERSION,
        "failures": failures,
        "model": model,
        "deprecated": sorted({str(each.message) for each in caught if "kvframe_frozen" in each.filename}),
        "extensions": sorted(EXTENSIONS),
        "later": sorted(importlib.import_module("kvframe.attention.layer").SEEN) if newer else [],
        "last_hook": _HOOKS[-1],
        "last_field": [*type(make_metadata([Request(3, 1)], 4)).__annotations__][-1],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
