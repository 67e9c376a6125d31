"""``kvframe doctor``: what is installed here, what works, what is broken, and what to type."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement

from kvframe.cli.guard import joined_lines
from kvframe.cli.model_check import check_model
from kvframe.cli.options import json_option, read_stack, stack_option
from kvframe.cli.render import format_bytes, print_facts, print_json, print_reasons, print_table
from kvframe.cli.store_check import CheckResult, check_publisher, check_stores
from kvframe.contract.errors import PlanError, PluginError
from kvframe.contract.foreign import explain_failed_import
from kvframe.loading.claims import BUILTIN_OWNER, canonical
from kvframe.loading.misnamed import find_misnamed
from kvframe.loading.packages import to_install, to_run_models

if TYPE_CHECKING:
    from kvframe.loading.claims import Claim
    from kvframe.loading.plugins import PluginHost

BROKEN_EXIT_CODE = 1
"""Exit code if something that kvframe or an installed plugin needs is broken."""

WITHOUT_TORCH = "torch is not installed: kvframe plans layer files and manages caches, and runs no model"
"""What is said in place of the devices."""

_BROKEN_STATUSES = ("incompatible", "conflict", "broken")


@click.command(short_help="Check what is installed here, and say what to type.")
@click.argument("model", type=click.Path(path_type=Path), required=False)
@stack_option
@json_option
def doctor(model: Path | None, stack_file: Path | None, as_json: bool) -> None:
    """Check versions, devices, libraries and plugins, and say what is broken and what to type.

    With a MODEL (a folder, a config.json, the id of a repository or a layer file; no weights are read), say what would
    serve it, or what it lacks and what to type.

    Every registered class is imported, and every backend is asked if it can run here. A library that is not installed
    and a backend without its device are no fault. Nor is a missing torch, where no installed plugin requires it: layer
    files are planned and caches are managed without it. The page stores of the stack are opened, and closed again. The
    exit code is 1 if something that an installed plugin needs is broken: a requirement that is missing or too old, a
    plugin that fails, a name that two plugins claim; if a page store cannot be opened now; or if the MODEL cannot be
    served.
    """
    from kvframe.loading.plugins import load_plugins
    from kvframe.planning.recognise import find_model

    stack = read_stack(stack_file)
    torch_problem = _try_torch()
    has_torch = find_spec("torch") is not None
    host = load_plugins(stack.plugins)
    entries = host.registry.claims()
    names = [_state_of(entry) for entry in entries]
    problems = [
        *([torch_problem] if torch_problem and (has_torch or model is not None) else []),
        *_requirement_problems(host),
        *_plugin_problems(host, names),
        *find_misnamed(),
    ]
    store_check = check_stores(stack, host.registry)
    publisher_check = check_publisher(stack, host.registry)
    problems += [*store_check.problems, *publisher_check.problems]
    model_check = None
    if model is not None and not torch_problem:
        model_check = check_model(find_model(model, weights=False, registry=host.registry), stack, host)
        problems += model_check.problems
    report = {
        "versions": _versions(host),
        "devices": [] if torch_problem else _devices(),
        "libraries": _libraries(entries),
        "plugins": [
            {"id": item.id, "version": item.version, "status": item.status, "reason": item.reason}
            for item in host.records
        ],
        "names": names,
        "page_stores": dict(store_check.facts),
        "event_publishers": dict(publisher_check.facts),
        "problems": problems,
        "model": None if model_check is None else dict(model_check.facts),
        "next": _next_steps(problems, names, model_check) if has_torch else _next_steps_without_torch(),
    }
    if as_json:
        print_json(report)
    else:
        _print(report, "torch cannot be imported" if has_torch else WITHOUT_TORCH)
    if problems:
        click.get_current_context().exit(BROKEN_EXIT_CODE)


def _versions(host: PluginHost) -> dict[str, str | None]:
    """Return the versions of kvframe, its contract, Python, the system and what kvframe and its plugins require."""
    from kvframe.contract.hookspecs import API_VERSION

    distributions = {
        canonical(requirement.name)
        for _, requirement in _requirements(host)
        if isinstance(requirement, Requirement) and not requirement.name.startswith("kvframe")
    }
    return {
        "kvframe": _version("kvframe"),
        "contract": API_VERSION,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        **{name: _version(name) for name in sorted(distributions)},
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _try_torch() -> str:
    """Return why torch cannot be imported; empty if it can."""
    try:
        import torch  # noqa: F401
    except Exception as error:  # a broken library raises anything
        text = joined_lines(f"{type(error).__name__}: {error}")
        return explain_failed_import(error, text) or f"torch cannot be imported: {text}"
    return ""


def _processor() -> str:
    """Return the processor's name, and the number of threads that torch uses."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine() or "cpu"
    return f"{name}, {torch.get_num_threads()} threads"


def _devices() -> list[dict[str, Any]]:
    """Return the devices that torch sees, and why there is no CUDA device if there is none."""
    import torch

    from kvframe.planning.memory import free_bytes, physical_bytes

    try:
        free = free_bytes()
    except PlanError:
        free = None
    devices = [{"device": "cpu", "name": _processor(), "free_bytes": free, "total_bytes": physical_bytes()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "free_bytes": None,  # asking would start CUDA on the device
                "total_bytes": properties.total_memory,
            }
        )
    return devices


def _state_of(entry: Claim) -> dict[str, str]:
    """Import what a name stands for; return its kind, name and plugin, whether it can be used, and why not.

    The state is ``"usable"``; ``"missing"`` if something that it needs is not installed; ``"unusable"`` if it says that
    it cannot run here; or ``"broken"`` if it fails.
    """
    state, reason = "usable", entry.problem()
    if reason:
        state = "missing" if entry.missing() else "broken"
    else:
        try:
            reason = entry.why_unusable(entry.load())
            state = "unusable" if reason else "usable"
        except PluginError as error:
            state, reason = "broken", str(error)
    kind = entry.kind.replace("_", " ")
    reason = joined_lines(reason)
    return {"kind": kind, "name": entry.name, "plugin": entry.plugin, "state": state, "reason": reason}


def _libraries(entries: Sequence[Claim]) -> list[dict[str, Any]]:
    """Return the modules that registered names need, by name; an empty version is that of none or an unknown one."""
    claims_by_module: dict[str, list[Claim]] = {}
    for entry in entries:
        for module in entry.needs:
            claims_by_module.setdefault(module.partition(".")[0], []).append(entry)
    providers = importlib.metadata.packages_distributions()
    libraries = []
    for module, claims in sorted(claims_by_module.items()):
        is_installed = not any(missing_module.partition(".")[0] == module for missing_module in claims[0].missing())
        distributions = providers.get(module, []) if is_installed else []
        libraries.append(
            {
                "module": module,
                "version": ", ".join(sorted({_version(distribution) or "" for distribution in distributions})),
                "installed": is_installed,
                "needed_by": [f"{entry.kind.replace('_', ' ')} {entry.name}" for entry in claims],
                "install": "" if is_installed else next((entry.install for entry in claims if entry.install), ""),
            }
        )
    return libraries


def _requirements(host: PluginHost) -> Iterator[tuple[str, Requirement | str]]:
    """Yield what kvframe's and the plugins' distributions require here, each with the distribution."""
    for distribution in dict.fromkeys(["kvframe", *(record.distribution for record in host.records)]):
        try:
            requirement_texts = importlib.metadata.requires(distribution) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # a module that was passed as a plugin
        for text in requirement_texts:
            try:
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    yield distribution, requirement
            except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName) as error:
                yield distribution, f"its requirement {joined_lines(text)} cannot be read: {joined_lines(str(error))}"


def _requirement_problems(host: PluginHost) -> Iterator[str]:
    """Yield the requirements that are not met."""
    for distribution, requirement in _requirements(host):
        if isinstance(requirement, str):
            yield f"{distribution}: {requirement}"
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            finding = "it is not installed" if version is None else f"{version} is installed"
            needs = f"{distribution} needs {requirement.name}{requirement.specifier}"
            yield f"{needs}, and {finding}: pip install '{requirement}'"


def _plugin_problems(host: PluginHost, names: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield what is wrong with plugins and the names that they register."""
    for record in host.records:
        if record.status in _BROKEN_STATUSES:
            yield f"plugin {record.id} is {record.status}: {joined_lines(record.reason)}"
    for catalogue in host.registry.catalogues.values():
        for name, owners in catalogue.contested().items():
            kind = catalogue.kind
            yield (
                f"{kind} {name} is claimed by {' and '.join(owners)}: choose one in the stack, "
                f'[plugins.owners.{kind}] {name} = "{owners[0]}"'
            )
    for entry in names:
        if entry["state"] == "broken":
            yield "{kind} {name} of {plugin} is broken: {reason}".format(**entry)


def _next_steps(
    problems: Sequence[str], names: Sequence[Mapping[str, str]], model_check: CheckResult | None
) -> list[str]:
    """Return what to type next."""
    if model_check is not None and model_check.install:
        return [model_check.install]
    if problems:
        return ["kvframe doctor, after the problems are solved"]
    usable_entries = [entry for entry in names if entry["state"] == "usable"]
    if not any(entry["kind"] == "model adapter" for entry in usable_entries):
        return [f"{to_install('kvframe-transformers')} to read Hugging Face models"]
    if all(entry["plugin"].startswith(f"{BUILTIN_OWNER}:") for entry in usable_entries if entry["kind"] == "backend"):
        return [f"{to_install('kvframe-torch')} for a backend that is not slow on purpose"]
    return [
        "kvframe plan MODEL to see what its cache takes",
        "kvframe explain MODEL to see which backend serves each layer",
        "kvframe generate MODEL --prompt TEXT",
    ]


def _next_steps_without_torch() -> list[str]:
    """Return what to type next if torch is not installed."""
    return ["kvframe plan FILE to plan the cache of a layer file", f"{to_run_models()} to run models"]


def _print(report: dict[str, Any], without_devices: str) -> None:
    print_facts("Versions", [(name, version or "not installed") for name, version in report["versions"].items()])
    devices = [(item["device"], _device_in_words(item)) for item in report["devices"]]
    if len(devices) == 1:
        devices.append(("cuda", "none that torch sees"))
    print_facts("Devices", devices or [("unknown", without_devices)])
    print_table(
        "Libraries",
        ("library", "version", "needed by"),
        [
            (
                item["module"],
                (item["version"] or "unknown") if item["installed"] else "missing",
                ", ".join(item["needed_by"][:3]) + (" …" if len(item["needed_by"]) > 3 else ""),
            )
            for item in report["libraries"]
        ],
    )
    statuses: dict[str, list[str]] = {}
    for item in report["plugins"]:
        statuses.setdefault(item["status"], []).append(item["id"].rpartition(":")[2])
    print_facts("Plugins", [(f"{len(plugins)} {status}", ", ".join(plugins)) for status, plugins in statuses.items()])
    reasons: dict[str, list[str]] = {}
    for item in report["names"]:
        if item["state"] in ("missing", "unusable"):
            reasons.setdefault(item["reason"], []).append(f"{item['kind']} {item['name']}")
    for item in report["plugins"]:
        if item["status"] == "disabled":
            reasons.setdefault(f"{item['status']}: {item['reason']}", []).append(f"plugin {item['id']}")
    if reasons:
        print_reasons("Not usable here, and no fault", reasons)
    for title, key in (("Page stores", "page_stores"), ("Event publisher", "event_publishers"), ("Model", "model")):
        if report[key]:
            print_facts(title, report[key].items())
    print_facts("Problems", [(str(index), text) for index, text in enumerate(report["problems"], 1)] or [("none", "")])
    print_facts("Type", [("", text) for text in report["next"]])


def _device_in_words(device: dict[str, Any]) -> str:
    free, total = device["free_bytes"], device["total_bytes"]
    words = [device["name"]]
    if total is not None:
        words.append(
            f"{format_bytes(total)} of memory" + ("" if free is None else f", {format_bytes(free)} of it free")
        )
    return ", ".join(words)
