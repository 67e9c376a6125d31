"""What a model lacks here: attention types, wrappers, a backend for each layer; and the one line that installs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvframe.cli.store_check import CheckResult
from kvframe.contract.errors import KVFrameError
from kvframe.loading.packages import provider_of, to_install

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.contract.description import ModelDescription
    from kvframe.hosting.setup import Setup
    from kvframe.loading.plugins import PluginHost, PluginRecord
    from kvframe.loading.registry import Registry


def check_model(path: Path, stack: Stack, host: PluginHost) -> CheckResult:
    """Return what a model lacks, or what would serve it."""
    from kvframe.hosting.setup import Setup
    from kvframe.planning.recognise import describe_model

    try:
        missing_names = _missing(describe_model(path, host.registry), host.registry)
        if missing_names:
            return _lacking(missing_names, host.records)
        return CheckResult(facts=_facts(Setup.read(path, stack, host.registry)))
    except KVFrameError as error:
        return CheckResult(problems=(str(error),))


def _missing(description: ModelDescription, registry: Registry) -> list[tuple[str, str]]:
    """Return the attention types and default wrappers that no plugin registers, each with its kind."""
    kinds = sorted({layer.kind for layer in description.layers})
    wrappers = {
        wrapper for kind in kinds if kind in registry.specs for wrapper in registry.specs.load(kind).default_wrappers
    }
    return [
        *(("spec", kind) for kind in kinds if kind not in registry.specs),
        *(("wrapper", name) for name in sorted(wrappers) if name not in registry.wrappers),
    ]


def _lacking(missing_names: list[tuple[str, str]], records: Sequence[PluginRecord]) -> CheckResult:
    providers = {claim: provider_of(*claim) for claim in missing_names}
    not_loaded = {record.distribution: record for record in records if record.status != "loaded"}
    labels = {"spec": "attention type", "wrapper": "wrapper"}
    packages = [package for package in dict.fromkeys(providers.values()) if package and package not in not_loaded]
    return CheckResult(
        problems=tuple(
            f"the model needs the {labels[kind]} {name!r}, {_whence(provider, not_loaded)}"
            for (kind, name), provider in providers.items()
        ),
        install=to_install(*packages) if packages else "",
    )


def _whence(provider: str | None, not_loaded: Mapping[str, PluginRecord]) -> str:
    if provider is None:
        return "which no package of kvframe provides"
    if provider in not_loaded:
        record = not_loaded[provider]
        return f"which {provider} provides; its plugin is {record.status}: {record.reason}"
    return f"which {provider} provides"


def _facts(setup: Setup) -> dict[str, str]:
    """Return what would serve a model; raise a ``KVFrameError`` if nothing can."""
    counts: dict[str, int] = {}
    for layer in setup.description.layers:
        counts[layer.kind] = counts.get(layer.kind, 0) + 1
    backends = sorted({choice.backend for choice in setup.choices})
    return {
        "layers": ", ".join(f"{count} {kind}" for kind, count in counts.items()),
        "runs on": f"{setup.stack.model.device}, {setup.stack.model.dtype}",
        "backends": ", ".join(backends) or "none, as no layer attends",
    }
