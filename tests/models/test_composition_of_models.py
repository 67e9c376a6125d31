"""Every kind of model with every chain, format, drafts, graphs and compilation: equal, or refused with a code."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable
from pathlib import Path

import attrs
import pytest
from kvframe_testing.sample import cover
from kvframe_transformers.model import TransformersModel

from kvframe.contract.errors import BackendError
from tests.models.composition import EQUAL, FORMATS, KINDS, WRONG, Cell, Models, cells, read, render

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "plugins" / "COMPOSITION_OF_MODELS.md"
DOCUMENTED = ROOT / "docs" / "refusals.md"
COMPILING = 40.0
"""How much longer a cell takes if its model is compiled."""


def pairs_of(cell: Cell) -> set[Hashable]:
    """Return what the sample must contain of a cell.

    Each kind, chain and format is asked for drafts and for graphs; without both, other tests serve the models.
    One model is compiled.
    """
    switches = [name for name in ("drafts", "graphs") if getattr(cell, name)]
    if cell.compiled:
        return {"compiled"} if len(switches) == 2 else set()
    return {*itertools.product([cell.kind, f"chain {cell.chain}", cell.kv_format], switches)}


def cost_of(cell: Cell) -> float:
    """Return what a cell costs in the sample; a row's own format costs less, so that rows have different formats."""
    rows = [*dict.fromkeys((combination.kind, combination.chain) for combination in ALL)]
    own = FORMATS[rows.index((cell.kind, cell.chain)) % len(FORMATS)]
    return COMPILING if cell.compiled else 0.9 if cell.kv_format == own else 1.0


ALL = [*cells()]
SAMPLE = {ALL[index] for index in cover([*map(pairs_of, ALL)], [*map(cost_of, ALL)])}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def verdicts() -> dict[Cell, str]:
    return read(FILE.read_text(encoding="utf-8"))


def name_of(cell: Cell) -> str:
    return "-".join(
        [*attrs.astuple(cell)[:3], *(name for name in ("drafts", "graphs", "compiled") if getattr(cell, name))]
    )


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=name_of(cell), marks=[] if cell in SAMPLE else pytest.mark.whole) for cell in ALL]
)
def test_a_cell_of_the_file_is_what_the_engine_does(models: Models, verdicts: dict[Cell, str], cell: Cell) -> None:
    verdict, why = models.judge(cell)
    assert verdicts[cell] == verdict, why


def test_the_file_has_every_cell_and_no_wrong_one(verdicts: dict[Cell, str]) -> None:
    assert FILE.read_text(encoding="utf-8") == render(verdicts)
    assert ALL == [*verdicts]
    assert WRONG not in verdicts.values()


def test_only_two_kinds_of_models_are_refused_anything(verdicts: dict[Cell, str]) -> None:
    refused = {cell: verdict for cell, verdict in verdicts.items() if verdict != EQUAL}
    generating_nothing = {cell for cell in ALL if KINDS[cell.kind].family == "bert" and (cell.drafts or cell.graphs)}
    by_content = {cell for cell in ALL if KINDS[cell.kind].by_content and (cell.graphs or cell.compiled)}
    assert generating_nothing | by_content == refused.keys()
    assert {"nothing_generated"} == {refused[cell] for cell in generating_nothing}
    assert {"not_captured", "not_compiled"} == {refused[cell] for cell in by_content}


def test_an_error_with_a_code_that_a_cell_may_not_have_is_wrong(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(cell: Cell) -> None:
        raise BackendError("a mistake")  # its code is not_served

    monkeypatch.setattr(models, "_run", fail)
    for cell in (Cell("full attention", "", "plain"), Cell("encoder alone", "", "plain", drafts=True)):
        verdict, why = models.judge(cell)
        assert WRONG == verdict
        assert "a mistake" in why


def test_a_compiled_model_whose_steps_run_uncompiled_is_wrong(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("full attention", "", "plain", compiled=True)
    assert (EQUAL, "") == models.judge(cell)
    monkeypatch.setattr(TransformersModel, "_running_body", property(lambda model: model._body))
    verdict, why = models.judge(cell)
    assert WRONG == verdict
    assert why.startswith("0 graphs ran in ")


def codes_of_matrices() -> set[str]:
    text = (ROOT / "plugins" / "COMPOSITION.md").read_text(encoding="utf-8")
    of_cells = re.findall(r"`([a-z][a-z0-9_]*)`", "\n".join(re.findall(r"^(?:\| .*|- .*)$", text, re.MULTILINE)))
    names = re.findall(r"^\| layer .*$|^## .*$|^- (?=`)[^:]*", text, re.MULTILINE)
    parts = set(re.findall(r"`([a-z0-9_]+)`", "\n".join(names)))
    return {*of_cells, *read(FILE.read_text(encoding="utf-8")).values()} - parts - {EQUAL, "code"}


def codes_of_sources() -> set[str]:
    """Return the codes of what says why a layer, a chain or a backend is refused."""
    folders = (ROOT / "kvframe", *(ROOT / "plugins").glob("*/src"))
    text = "\n".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    plain = re.findall(r"(?:Refusal|refuse)\(\s*\"([a-z_]+)\"", text)
    wrapped = re.findall(r"WrapperError\((?:(?!\braise\b)[^`])*?code=\"([a-z_]+)\"", text, re.DOTALL)
    stack = re.findall(r"StackError\((?:(?!\braise\b)[^`])*?code=\"([a-z_]+)\"", text, re.DOTALL)
    return {*plain, *wrapped, *stack}


def test_every_code_is_explained() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", DOCUMENTED.read_text(encoding="utf-8"), re.MULTILINE)
    explained = set(re.findall(r"`([a-z_]+)`", " ".join(rows)))
    matrix_codes, source_codes = codes_of_matrices(), codes_of_sources()
    assert {"nothing_generated", "keeps_cache", "mask_chunk", "chain_order", "environment"} <= matrix_codes
    assert {"no_chunk", "dtype", "not_captured", "chain_order"} <= source_codes
    of_masks = {f"mask_{feature}" for feature in ("bidirectional", "window", "sink_tokens", "chunk")}
    assert set() == (matrix_codes | source_codes | of_masks) - explained


def test_a_sample_has_every_kind_chain_and_format_and_one_compilation() -> None:
    assert set().union(*map(pairs_of, ALL)) == set().union(*map(pairs_of, SAMPLE))
    assert 1 == sum(cell.compiled for cell in SAMPLE)
    for switch in ("drafts", "graphs"):
        for trait in ("kind", "chain", "kv_format"):
            expected = {getattr(cell, trait) for cell in ALL}
            assert expected == {getattr(cell, trait) for cell in SAMPLE if getattr(cell, switch)}
