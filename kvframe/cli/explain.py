"""``kvframe explain``: what a stack will do with each layer of a model, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvframe.cli.options import dtype_option, json_option, load_checked_plugins, read_stack, stack_option
from kvframe.cli.render import compact_names, print_json, print_table
from kvframe.contract.eviction import LRU
from kvframe.contract.formats import PLAIN

if TYPE_CHECKING:
    from kvframe.contract.eviction import EvictionPolicy
    from kvframe.contract.specs import LayerSpec
    from kvframe.contract.wrapper import MetadataWrapper
    from kvframe.planning.groups import Grouping
    from kvframe.selection.choice import Choice


UNUSABLE = (["import"], ["environment"], ["device"])
"""Codes of refusals that hold for every layer: the backend cannot run in this environment or on this device."""


@click.command(short_help="Say which wrappers and backend each layer gets, and why.")
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL_OR_CONFIG")
@stack_option
@click.option("--device", metavar="DEVICE", help="Where it would run. Default: as in the stack.")
@dtype_option
@json_option
def explain(model: Path, stack_file: Path | None, device: str | None, dtype: str | None, as_json: bool) -> None:
    """Say for each layer of a model its group, wrapper chain and backend, and why the other backends were not chosen.

    MODEL_OR_CONFIG is what `kvframe plan` takes; no weights are read.
    """
    from kvframe.config.eviction_choice import make_policy
    from kvframe.planning.groups import group_layers, make_layer_specs
    from kvframe.planning.recognise import describe_model
    from kvframe.selection.select import select_backends
    from kvframe.selection.skipping import find_skippable_layers

    stack = read_stack(stack_file, engine={"device": device, "dtype": dtype})
    registry = load_checked_plugins(stack).registry
    eviction = _in_words(make_policy(stack, registry))
    description = describe_model(model, registry)
    layers = make_layer_specs(description, registry, stack, stack.engine.dtype)
    grouping = group_layers(layers, hybrid=stack.cache.hybrid)
    skipped = () if stack.engine.prefill_skipping is None else find_skippable_layers(layers)
    choices = select_backends(layers, stack, registry, stack.engine.device.partition(":")[0], skipped)
    backends = [registry.backends.get(name).id for name in registry.backends.names()]
    chosen = {choice.layer: choice for choice in choices}
    explained = [_explain(layer, grouping, chosen.get(layer.name), backends) for layer in layers if layer.spec]
    if as_json:
        print_json({"model": description.name, "note": grouping.note, "eviction": eviction, "layers": explained})
        return
    _print(description.name, explained)
    if grouping.note is not None:
        click.echo(grouping.note)
    if stack.cache.eviction.name != LRU.name:
        click.echo(f"cached pages are evicted by the policy {eviction}")


def _explain(layer: LayerSpec, grouping: Grouping, choice: Choice | None, backends: Sequence[str]) -> dict[str, Any]:
    assert layer.spec is not None
    groups = grouping.groups_of(layer.name) if layer.spec.keeps_past else ()
    place = {
        "layer": layer.name,
        "kind": layer.spec.kind,
        "group": groups[0].index if groups else None,
        "rollback_group": groups[1].index if len(groups) > 1 else None,
        "shares_with": grouping.follows.get(layer.name),
        "format": layer.spec.kv_format.name,
    }
    if choice is None:
        nothing: dict[str, Any] = {"backend": None, "on_copies": False, "by_time": False, "seconds": {}, "others": []}
        return {**place, "wrappers": [], **nothing}
    considered = {candidate.name: candidate for candidate in choice.candidates}
    others = [
        {
            "backend": candidate.name,
            "codes": [refusal.code for refusal in candidate.refusals],
            "reason": choice.why_not(candidate),
        }
        for name, candidate in considered.items()
        if name != choice.backend
    ]
    # If the stack names a backend, no other one is considered.
    named = f"not asked: the stack names {choice.backend}"
    others += [{"backend": name, "codes": [], "reason": named} for name in backends if name not in considered]
    return {
        **place,
        "wrappers": [_in_words(wrapper) for wrapper in choice.wrappers],
        "backend": choice.backend,
        "on_copies": choice.on_copies,
        "by_time": choice.by_time,
        "seconds": {
            candidate.name: dict(candidate.time.seconds)
            for candidate in choice.candidates
            if candidate.time is not None
        },
        "others": others,
    }


def _in_words(chosen: MetadataWrapper | EvictionPolicy) -> str:
    """Return the name of a wrapper or policy, with its parameters if it has any."""
    parameters = ", ".join(f"{name} = {value}" for name, value in attrs.asdict(chosen, recurse=False).items())
    return f"{chosen.name} ({parameters})" if parameters else chosen.name


def _served_by(explained: dict[str, Any]) -> str:
    """Return a layer's backend, whether it reads copies of another format, and its measured time if that decided."""
    from kvframe.selection.times import MeasuredTime, in_words

    backend, kv_format = explained["backend"], explained["format"]
    if backend is None:
        return "computed by the model"
    words = str(backend)
    if kv_format != PLAIN.name:
        words += f", on copies of {kv_format}" if explained["on_copies"] else f", on {kv_format}"
    if explained["by_time"]:
        words += f" ({in_words(MeasuredTime(explained['seconds'][backend]))})"
    return words


def _print(model: str, explained: list[dict[str, Any]]) -> None:
    """Print one row for all layers with equal explanations, and once the backends that no layer can have here."""
    alike: dict[tuple[str, ...], list[str]] = {}
    unusable: dict[str, str] = {}
    for each in explained:
        unusable |= {other["backend"]: other["reason"] for other in each["others"] if other["codes"] in UNUSABLE}
        others = "; ".join(
            f"{other['backend']}: {other['reason']}" for other in each["others"] if other["codes"] not in UNUSABLE
        )
        row = (
            each["kind"],
            str("none" if each["group"] is None else each["group"])
            + ("" if each["rollback_group"] is None else f" and {each['rollback_group']}")
            + (f" (of {each['shares_with']})" if each["shares_with"] else ""),
            " → ".join(each["wrappers"]) or "none",
            _served_by(each),
            others or "none",
        )
        alike.setdefault(row, []).append(each["layer"])
    print_table(
        f"{model}: {len(explained)} layers",
        ("layers", "kind", "group", "wrappers", "backend", "other backends"),
        [(f"{len(names)}: {compact_names(names)}", *row) for row, names in alike.items()],
    )
    if unusable:
        print_table("not usable here", ("backend", "reason"), [*unusable.items()])
