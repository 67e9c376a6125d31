"""The composition matrix: each wrapper chain with each backend computes attention or is refused with a code.

``python -m tests.testing.composition plugins/COMPOSITION.md`` writes it. With ``--check``, it reports whether the file
is up to date.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
from kvframe_testing import composition
from kvframe_testing.composition import NOT_CAUSAL, RANGES, SHARING, make_labelled_layer
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import chain_refusals
from kvframe_testing.laws import ConformanceError
from kvframe_testing.state import StateForm, form_of

from kvframe.attention.group import honours_ranges
from kvframe.attention.wrapping import MISTAKES
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import PluginError, WrapperError
from kvframe.contract.specs import LayerSpec
from kvframe.loading.plugins import load_plugins
from kvframe.loading.registry import Registry
from kvframe.selection.choice import WrapperChain
from kvframe.selection.refusals import find_not_causal

EQUAL = "equal"
WRONG = "WRONG"

MISSING = ("environment", "import")
"""Verdicts on a backend that cannot run at all on this machine."""

MAX_CHAIN = 2
"""The most wrappers of a chain. The matrix has every pair, including a wrapper with itself."""

INTRODUCTION = """\
# Which wrappers and backends compose

Every chain of up to two wrappers, before every backend, on every kind of layer that stores what the backend reads. A
layer that shares another's cache has a row of its own if its results differ. A cell says one of two things:

- equal: mixed batches, decodes with draft tokens and unfinished prefills, also padded to the sizes of a graph, gave
  what dense attention under the layer's own mask gives, within the error of the dtype;
- a `code`: refused, by a wrapper or by what the backend declares. The refusal comes with a sentence that says why.

It was made from what is installed, with `python -m tests.testing.composition plugins/COMPOSITION.md`.
"""


@attrs.frozen(kw_only=True)
class Cell:
    """The verdict on one chain with one backend, on one kind of layer.

    Attributes:
        chain: The wrappers' names, in order.
        layer: The kind of layer.
        backend: The backend's name.
        verdict: ``EQUAL``, ``WRONG``, or the codes of the refusals.
        detail: The error in one sentence; empty if there is none.
    """

    chain: tuple[str, ...]
    layer: str
    backend: str
    verdict: str
    detail: str = ""


def compose(registry: Registry, device: str = "cpu") -> tuple[Cell, ...]:
    """Return every cell.

    Args:
        registry: The wrappers and backends. Wrappers are made without options: the layers decide their parameters.
        device: The device of the backends.
    """
    return tuple(
        Cell(chain=names, layer=layer, backend=backend, verdict=verdict, detail=detail)
        for length in range(MAX_CHAIN + 1)
        for names in itertools.product(registry.wrappers.names(), repeat=length)
        for backend in registry.backends.names()
        for layer, verdict, detail in _judge_layers(registry, names, backend, device)
    )


def _judge_layers(
    registry: Registry, names: Sequence[str], backend: str, device: str
) -> Iterator[tuple[str, str, str]]:
    """Yield each kind of layer with its verdict and detail."""
    labels = [label + sharing for label in composition.LAYERS for sharing in ("", SHARING)]
    try:
        backend_class: type[AttentionBackend] = registry.backends.load(backend)
        form = form_of(backend_class)
        chain: WrapperChain = tuple(registry.wrappers.load(name)() for name in names)
        unusable = "environment" if backend_class.unusable_reason() else ""
    except (PluginError, TypeError) as error:
        unusable = "import" if isinstance(error, PluginError) else "options"
    if unusable:
        yield from ((label, unusable, "") for label in labels)
        return
    judged = []
    for label in labels:
        layer = make_labelled_layer(label, backend_class.capabilities, form)
        judged.append((label, *_judge(backend_class, chain, label, layer, form, device)))
    if not chain and not any(verdict in (EQUAL, WRONG) for _, verdict, _ in judged):
        nothing = f"{backend_class.__name__} serves no layer at all on {device}, so that nothing of it was computed"
        judged = [(label, WRONG, f"{nothing}: {verdict}") for label, verdict, _ in judged]
    yield from judged


def _judge(
    backend_class: type[AttentionBackend],
    chain: WrapperChain,
    label: str,
    layer: LayerSpec,
    form: StateForm,
    device: str,
) -> tuple[str, str]:
    capabilities = backend_class.capabilities
    codes = [refusal.code for refusal in chain_refusals(chain, layer, capabilities, device)]
    causal = NOT_CAUSAL not in label
    if not codes and not causal and (not_causal := find_not_causal(capabilities)) is not None:
        codes = [not_causal.code]
    if not codes and RANGES in label and not honours_ranges(capabilities, chain):
        codes = ["mask_ranges"]
    if codes:
        return " ".join(codes), ""
    try:
        for case in composition.make_cases_of(chain, label, layer, causal):
            check_backend(backend_class, attrs.evolve(case, form=form), device)
    except WrapperError as error:
        return (WRONG, str(error)) if error.code in MISTAKES else (error.code, "")
    except ConformanceError as error:
        return WRONG, str(error)
    except Exception as error:
        # An error of one backend must not prevent the cells of the others.
        return WRONG, f"{backend_class.__name__} on {label}: {type(error).__name__}: {error}"
    return EQUAL, ""


# --- the file ---------------------------------------------------------------------------------------------------------


def render(cells: Sequence[Cell]) -> str:
    """Return the matrix as Markdown: a table per chain, with a row per kind of layer and a column per backend.

    Backends that cannot run are listed at the end.
    """
    parts = [INTRODUCTION]
    tables = []
    refused = []
    missing = {cell.backend: cell.verdict for cell in cells if cell.verdict in MISSING}
    here = [cell for cell in cells if cell.backend not in missing]
    for chain, group in itertools.groupby(here, key=lambda cell: cell.chain):
        members = [*group]
        title = " → ".join(f"`{name}`" for name in chain) or "No wrapper"
        verdicts = {cell.verdict for cell in members}
        if len(verdicts) == 1 and EQUAL not in verdicts and WRONG not in verdicts:
            refused.append(f"- {title}: {_shown(verdicts.pop())}\n")
        else:
            tables.append(f"## {title}\n\n{_table(members)}")
    parts += tables
    if refused:
        parts.append(f"## Refused on every layer\n\n{''.join(refused)}")
    if missing:
        lines = "".join(f"- `{backend}`: {_shown(verdict)}\n" for backend, verdict in missing.items())
        parts.append(f"## Backends that do not run where this was made\n\n{lines}")
    return "\n".join(parts)


def _table(cells: Sequence[Cell]) -> str:
    backends = [*dict.fromkeys(cell.backend for cell in cells)]
    verdicts_of_layers: dict[str, list[str]] = {}
    for cell in cells:
        verdicts_of_layers.setdefault(cell.layer, []).append(_shown(cell.verdict))
    rows = [["layer", *(f"`{backend}`" for backend in backends)]]
    for layer, verdicts in verdicts_of_layers.items():
        if not layer.endswith(SHARING) or verdicts != verdicts_of_layers[layer.removesuffix(SHARING)]:
            rows.append([layer, *verdicts])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "".join(
        f"| {' | '.join(text.ljust(width) for text, width in zip(row, widths, strict=True))} |\n" for row in rows
    )


def _shown(verdict: str) -> str:
    if verdict in (EQUAL, WRONG):
        return verdict
    return ", ".join(f"`{code}`" for code in verdict.split())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the matrix of the installed plugins, or check a file; return 1 if something is wrong or out of date."""
    parser = argparse.ArgumentParser(prog="python -m tests.testing.composition", description=compose.__doc__)
    parser.add_argument("file", type=Path, help="where the matrix is, as Markdown")
    parser.add_argument("--check", action="store_true", help="write nothing, say whether the file is up to date")
    options = parser.parse_args(arguments)
    cells = compose(load_plugins().registry)
    text = render(cells)
    wrong = [cell.detail for cell in cells if cell.verdict == WRONG]
    if not options.check:
        options.file.write_text(text, encoding="utf-8")
    elif not options.file.exists() or options.file.read_text(encoding="utf-8") != text:
        wrong.append(f"{options.file} is not what is installed: run this without --check")
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
