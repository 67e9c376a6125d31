"""``kvframe explain``: what a stack will do with each layer of a model, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvframe.cli.options import (
    dtype_option,
    html_option,
    json_option,
    load_checked_plugins,
    read_stack,
    stack_option,
)
from kvframe.cli.pages import write_page
from kvframe.cli.render import compact_names, print_facts, print_json, print_note, print_reasons, print_table
from kvframe.contract.eviction import LRU
from kvframe.contract.formats import PLAIN

if TYPE_CHECKING:
    from kvframe.contract.eviction import EvictionPolicy
    from kvframe.contract.specs import LayerSpec
    from kvframe.contract.wrapper import MetadataWrapper
    from kvframe.hosting.setup import Setup
    from kvframe.loading.registry import Registry
    from kvframe.planning.groups import Grouping
    from kvframe.selection.choice import Choice

_NUM_CELLS = 4
"""The cells of a row after its number and its layers."""


@click.command(short_help="Say which wrappers and backend each layer gets, and why.")
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL_OR_CONFIG")
@stack_option
@click.option("--device", metavar="DEVICE", help="Where it would run. Default: as in the stack.")
@dtype_option
@click.option("--verbose", is_flag=True, help="Say for every other backend the whole reason, row by row.")
@html_option
@json_option
def explain(
    model: Path,
    stack_file: Path | None,
    device: str | None,
    dtype: str | None,
    verbose: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Say for each layer of a model its group, wrapper chain and backend, and why the other backends were not chosen.

    MODEL_OR_CONFIG is what `kvframe plan` takes; no weights are read.
    """
    from kvframe.hosting.setup import Setup
    from kvframe.planning.recognise import find_model, find_reader

    stack = read_stack(stack_file, model={"device": device, "dtype": dtype})
    registry = load_checked_plugins(stack).registry
    path = find_model(model, weights=False, registry=registry)
    reader = find_reader(path, registry)
    setup = Setup.read(path, stack, registry, reader=reader)
    dtype = setup.stack.model.dtype
    lacks = reader.share_of_rank(path, setup.description, dtype=dtype, num_ranks=1).lacks
    eviction = _in_words(setup.make_part("eviction", setup.stack.cache.eviction))
    tiers = _names_of_tiers(setup)
    description, note = setup.description, setup.note
    backends = [registry.backends.get(name).id for name in registry.backends.names()]
    choices = {choice.layer: choice for choice in (*setup.choices, *setup.draft_choices)}
    explanations = [
        _explain(layer, setup.grouping, choices.get(layer.name), backends) for layer in setup.all_layers if layer.spec
    ]
    if html is not None:
        all_notes = (note, f"cached pages are evicted by {eviction}", _tiers_in_words(tiers), *lacks)
        notes = [note_text for note_text in all_notes if note_text]
        write_page(html, "explain.html", _page(description.name, explanations, registry, notes))
    if as_json:
        eviction_and_tiers = {"eviction": eviction, "tiers": tiers, "lacks": list(lacks)}
        print_json({"model": description.name, "note": note, **eviction_and_tiers, "layers": explanations})
        return
    _print(description.name, explanations, registry, verbose)
    if note is not None:
        print_note(note)
    if stack.cache.eviction.name != LRU.name:
        print_note(f"cached pages are evicted by the policy {eviction}")
    if tiers:
        print_note(_tiers_in_words(tiers))
    for sentence in lacks:
        print_note(sentence)


def _names_of_tiers(setup: Setup) -> list[str]:
    """Return where prefixes are found that the device no longer has, in the order in which it is asked."""
    from kvframe.planning.tiers import HOST_MEMORY

    stores = setup.make_page_stores()
    if not setup.caches_prefixes:
        return []
    host = [] if setup.stack.cache.host_memory is None else [HOST_MEMORY]
    # Only names: an option may hold a password.
    return [*host, *(store.name for store in stores)]


def _tiers_in_words(tiers: Sequence[str]) -> str:
    return f"prefixes that the device no longer has are found in {', '.join(tiers)}" if tiers else ""


def _explain(layer: LayerSpec, grouping: Grouping, choice: Choice | None, backends: Sequence[str]) -> dict[str, Any]:
    assert layer.spec is not None
    groups = grouping.groups_of(layer.name) if layer.spec.keeps_past else ()
    facts = {
        "layer": layer.name,
        "kind": layer.spec.kind,
        "group": groups[0].index if groups else None,
        "rollback_group": groups[1].index if len(groups) > 1 else None,
        "shares_with": grouping.follows.get(layer.name),
        "format": layer.spec.kv_format.name,
    }
    if choice is None:
        nothing: dict[str, Any] = {"backend": None, "on_copies": False, "others": []}
        return {**facts, "wrappers": [], **nothing}
    candidates = {candidate.name: candidate for candidate in choice.candidates}
    other_backends = [
        {
            "backend": candidate.name,
            "codes": [refusal.code for refusal in candidate.refusals],
            "reason": choice.why_not(candidate),
        }
        for name, candidate in candidates.items()
        if name != choice.backend
    ]
    # If the stack names a backend, no other one is considered.
    reason = f"not asked: the stack names {choice.backend}"
    other_backends += [{"backend": name, "codes": [], "reason": reason} for name in backends if name not in candidates]
    return {
        **facts,
        "wrappers": [_in_words(wrapper) for wrapper in choice.wrappers],
        "backend": choice.backend,
        "on_copies": choice.on_copies,
        "others": other_backends,
    }


def _in_words(part: MetadataWrapper | EvictionPolicy) -> str:
    """Return the name of a wrapper or policy, with its parameters if it has any."""
    parameters = ", ".join(f"{name} = {value}" for name, value in attrs.asdict(part, recurse=False).items())
    return f"{part.name} ({parameters})" if parameters else part.name


def _served_by(explanation: dict[str, Any], names: Mapping[str, str]) -> str:
    """Return a layer's backend, and whether it reads copies of another format."""
    backend, kv_format = explanation["backend"], explanation["format"]
    if backend is None:
        return "computed by the model"
    words = names.get(backend, str(backend))
    if kv_format != PLAIN.name:
        words += f", on copies of {kv_format}" if explanation["on_copies"] else f", on {kv_format}"
    return words


def _print(model: str, explanations: Sequence[dict[str, Any]], registry: Registry, verbose: bool) -> None:
    """Print one row for all layers with equal choices, then each reason against other backends once."""
    names = _short_names(registry)
    layers_by_row = _rows_of(explanations, names)
    print_table(
        f"{model}: {len(explanations)} layers",
        ("row", "layers", "kind", "group", "wrappers", "backend"),
        [
            (
                str(number),
                f"{len(row_layers)}: {compact_names([layer['layer'] for layer in row_layers])}",
                *row[:_NUM_CELLS],
            )
            for number, (row, row_layers) in enumerate(layers_by_row.items(), start=1)
        ],
    )
    others_by_row = {
        number: row_layers[0]["others"] for number, row_layers in enumerate(layers_by_row.values(), start=1)
    }
    others_by_row = {number: row_others for number, row_others in others_by_row.items() if row_others}
    if verbose:
        for number, row_others in others_by_row.items():
            print_facts(
                f"Row {number}: why not",
                [(candidate["backend"], _in_short(candidate, registry)) for candidate in row_others],
            )
    elif others_by_row:
        print_reasons("Why not the others", _by_reason(others_by_row, names, registry))
        print_note("--verbose says it row by row; `kvframe plugins NAME` says what a backend needs")


def _short_names(registry: Registry) -> dict[str, str]:
    """Return the names of backends as stacks may write them, by their ids."""
    return {registry.backends.get(name).id: name for name in registry.backends.names()}


def _rows_of(
    explanations: Sequence[dict[str, Any]], names: Mapping[str, str]
) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Return the layers of each row, which have equal choices."""
    layers_by_row: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for layer in explanations:
        layers_by_row.setdefault(_row(layer, names), []).append(layer)
    return layers_by_row


def _page(
    model: str, explanations: Sequence[dict[str, Any]], registry: Registry, notes: Sequence[str]
) -> dict[str, Any]:
    """Return the data of the page."""
    names = _short_names(registry)
    return {
        "model": model,
        "num_layers": len(explanations),
        "notes": list(notes),
        "rows": [
            {
                "num_layers": len(row_layers),
                "layers": compact_names([layer["layer"] for layer in row_layers]),
                "kind": row[0],
                "place": "no cache group" if row[1] == "none" else f"cache group {row[1]}",
                "wrappers": row_layers[0]["wrappers"],
                "backend": row[3],
                "others": [
                    {
                        "backend": names.get(candidate["backend"], candidate["backend"]),
                        "reason": _in_short(candidate, registry),
                    }
                    for candidate in row_layers[0]["others"]
                ],
            }
            for row, row_layers in _rows_of(explanations, names).items()
        ],
    }


def _row(explanation: dict[str, Any], names: Mapping[str, str]) -> tuple[str, ...]:
    """Return what is equal for layers of one row: its cells, and what is said below the table."""
    group = "none" if explanation["group"] is None else str(explanation["group"])
    rollback = "" if explanation["rollback_group"] is None else f" and {explanation['rollback_group']}"
    shares = f" (of {explanation['shares_with']})" if explanation["shares_with"] else ""
    cells = (
        explanation["kind"],
        group + rollback + shares,
        " → ".join(explanation["wrappers"]) or "none",
        _served_by(explanation, names),
    )
    return (*cells, *(f"{candidate['backend']}: {candidate['reason']}" for candidate in explanation["others"]))


def _by_reason(
    others_by_row: Mapping[int, Sequence[dict[str, Any]]], names: Mapping[str, str], registry: Registry
) -> dict[str, list[str]]:
    """Return each reason with its backends, each with its rows unless it has all; able backends come first."""
    rows_of: dict[tuple[bool, str], dict[str, list[int]]] = {}
    for number, row_others in others_by_row.items():
        for candidate in row_others:
            reason = bool(candidate["codes"]), _in_short(candidate, registry)
            rows_of.setdefault(reason, {}).setdefault(names.get(candidate["backend"], candidate["backend"]), []).append(
                number
            )
    return {
        reason: [
            name if len(rows) == len(others_by_row) else f"{name} ({_rows(rows)})" for name, rows in backends.items()
        ]
        for (_, reason), backends in sorted(rows_of.items(), key=lambda item: item[0][0])
    }


def _rows(numbers: Sequence[int]) -> str:
    return f"row{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _in_short(other: dict[str, Any], registry: Registry) -> str:
    """Return why a backend was passed over. The reason of a failed import leaves the backend's name out."""
    problem = registry.backends.get(other["backend"]).problem() if other["codes"] == ["import"] else ""
    return problem or str(other["reason"])
