"""Every pair of wrappers and backends computes the layer's mask, or is refused with a code: the matrix."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_testing import composition
from kvframe_testing.case import Case
from kvframe_testing.composition import SHARING, make_cases_of
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_cases
from kvframe_testing.sample import sample
from kvframe_testing.state import form_of

from kvframe import load_plugins
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract.capabilities import Capabilities
from kvframe.contract.specs import LayerSpec
from kvframe.loading.registry import Registry
from kvframe.selection.choice import WrapperChain
from tests.covering import keep
from tests.support.plugins import plugin
from tests.testing import composition as matrix
from tests.testing.composition import EQUAL, MISSING, WRONG, Cell, compose, main, render

FILE = Path(__file__).resolve().parents[2] / "plugins" / "COMPOSITION.md"
CODE = re.compile(r"[a-z][a-z0-9_]*( [a-z][a-z0-9_]*)*")


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_plugins().registry


@pytest.fixture(scope="module", params=["mixed", pytest.param("every step", marks=pytest.mark.whole)])
def cells(request: pytest.FixtureRequest, registry: Registry) -> Iterator[tuple[Cell, ...]]:
    """The matrix; in usual runs it is made with mixed batches only, on which each verdict is that of all steps.

    If they can be padded, they are padded in layers with a cache of their own, and are not where the cache is shared.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "mixed":
            for steps in ("STEPS", "CROSS_STEPS", "RANGE_STEPS"):
                patch.setattr(composition, steps, {"mixed": getattr(composition, steps)["mixed"]})
        with patch.context() as composing:
            if request.param == "mixed":
                composing.setattr(composition, "make_cases_of", make_one_case_of)
            composed_cells = compose(registry)
        yield composed_cells


def make_one_case_of(chain: WrapperChain, label: str, layer: LayerSpec, causal: bool) -> Iterator[Case]:
    plain, *padded = make_cases_of(chain, label, layer, causal)
    yield plain if SHARING in label else [plain, *padded][-1]


def test_the_file_is_what_is_installed(cells: tuple[Cell, ...]) -> None:
    assert FILE.read_text() == render(cells), "run python -m tests.testing.composition plugins/COMPOSITION.md"


def test_every_chain_before_every_backend_is_equal_or_refused_with_a_code(cells: tuple[Cell, ...]) -> None:
    assert [] == [cell for cell in cells if cell.verdict == WRONG]
    assert [] == [cell for cell in cells if not CODE.fullmatch(cell.verdict)]


def test_every_chain_of_up_to_two_wrappers_stands_before_every_backend(
    registry: Registry, cells: tuple[Cell, ...]
) -> None:
    wrappers = registry.wrappers.names()
    chains = {(), *((name,) for name in wrappers), *itertools.product(wrappers, repeat=2)}
    expected = {(chain, backend) for chain in chains for backend in registry.backends.names()}
    assert expected == {(cell.chain, cell.backend) for cell in cells}


def test_every_wrapper_and_every_backend_computes_something(registry: Registry, cells: tuple[Cell, ...]) -> None:
    equal = [cell for cell in cells if cell.verdict == EQUAL]
    assert {*registry.wrappers.names()} == {name for cell in equal for name in cell.chain}
    missing = {cell.backend for cell in cells if cell.verdict in MISSING}
    assert {"torch", "torch_reference", "mla"} <= {*registry.backends.names()} - missing
    assert {*registry.backends.names()} - missing == {cell.backend for cell in equal if cell.chain}


@pytest.mark.parametrize(
    ("verdict", "chain", "layer"),
    [
        (EQUAL, ("decode_only",), "window and sink tokens, sharing a cache"),
        ("keeps_cache", ("decode_only",), "window and sink tokens"),
        (EQUAL, ("chunked_local",), "chunks of whole blocks"),
        ("no_chunk", ("chunked_local",), "full"),
        (EQUAL, ("decode_only", "chunked_local"), "chunks of whole blocks, sharing a cache"),
        (EQUAL, ("decode_only", "chunked_local"), "chunks that end within a block, sharing a cache"),
        ("chain_order", ("chunked_local", "decode_only"), "chunks of whole blocks, sharing a cache"),
    ],
)
def test_the_two_wrappers_compose_before_both_torch_backends(
    verdict: str, chain: tuple[str, ...], layer: str, cells: tuple[Cell, ...]
) -> None:
    verdicts = {cell.backend: cell.verdict for cell in cells if (cell.chain, cell.layer) == (chain, layer)}
    assert {"torch": verdict, "torch_reference": verdict} == {
        name: verdicts[name] for name in ("torch", "torch_reference")
    }


MAIN = {"full", "window=5-sink_tokens=3", "bidirectional"}
CHUNKS = {"chunk=1", "chunk=2", "chunk=6", "chunk=16", "chunk=17", "chunk=32"}


@pytest.mark.parametrize("backend", keep(["torch", "torch_reference"], "torch"))
@pytest.mark.parametrize(
    ("names", "masks"),
    [(("decode_only",), MAIN), (("chunked_local",), CHUNKS), (("decode_only", "chunked_local"), CHUNKS)],
)
def test_the_two_wrappers_compute_cases_of_every_mask(
    names: tuple[str, ...], masks: set[str], backend: str, registry: Registry
) -> None:
    backend_class = registry.backends.load(backend)
    chain = tuple(registry.wrappers.load(name)() for name in names)
    cases = [case for case in make_cases(backend_class.capabilities, chains=[chain]) if case.wrappers]
    case_masks = {case.name.removeprefix("+".join(names) + "-").split("-block=")[0] for case in cases}
    assert masks <= case_masks
    for case in sample(cases):
        check_backend(backend_class, case)


TOGETHER = [("wrappers", name) for name in ("batch", "format", "is_padded", "visible", "causal")]


@pytest.mark.whole
@pytest.mark.parametrize("backend", ["torch", "torch_reference"])
@pytest.mark.parametrize("names", [("decode_only",), ("chunked_local",), ("decode_only", "chunked_local")])
def test_the_two_wrappers_compute_the_whole_grid(names: tuple[str, ...], backend: str, registry: Registry) -> None:
    backend_class = registry.backends.load(backend)
    chain = tuple(registry.wrappers.load(name)() for name in names)
    for case in make_cases(backend_class.capabilities, chains=[chain]):
        if case.wrappers:
            check_backend(backend_class, case)


BACKENDS = ("cpu", "numba", "flex", "mla", "triton", "triton_mla")
INTERPRETED = ("triton", "triton_mla")
"""An interpreted case takes a second, so in usual runs their sample has every trait, and not every pair."""


@pytest.mark.parametrize("backend", keep(BACKENDS, "cpu", "triton", "triton_mla"))
def test_the_two_wrappers_compute_some_of_the_grid(backend: str, registry: Registry) -> None:
    check_after_wrappers(backend, registry, () if backend in INTERPRETED else TOGETHER)


@pytest.mark.whole
@pytest.mark.parametrize("backend", INTERPRETED)
def test_the_two_wrappers_compute_every_pair_of_traits(backend: str, registry: Registry) -> None:
    check_after_wrappers(backend, registry, TOGETHER)


def check_after_wrappers(backend: str, registry: Registry, together: Sequence[tuple[str, str]]) -> None:
    backend_class = registry.backends.load(backend)
    devices = backend_class.capabilities.devices
    names = (("decode_only",), ("chunked_local",), ("decode_only", "chunked_local"))
    chains = [tuple(registry.wrappers.load(name)() for name in chain) for chain in names]
    case_grid = make_cases(backend_class.capabilities, min(devices), chains, form_of(backend_class))
    cases = sample([case for case in case_grid if case.wrappers], together)
    assert {tuple(wrapper.name for wrapper in case.wrappers) for case in cases} == set(names)
    # Without a GPU, Triton's interpreter runs its kernels on the CPU.
    device = "cuda" if "cpu" not in devices and torch.cuda.is_available() else "cpu"
    for case in cases:
        check_backend(backend_class, case, device)


# --- other people's plugins -------------------------------------------------------------------------------------------


class SlightlyWrong(TorchReferenceBackend):
    capabilities = Capabilities(devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), masks=frozenset({"causal"}))

    def attend(self, *args: Any, **options: Any) -> torch.Tensor:
        return super().attend(*args, **options) + 0.01


class Elsewhere(TorchReferenceBackend):
    @classmethod
    def unusable_reason(cls) -> str | None:
        return "it runs elsewhere"


def test_another_plugin_changes_the_matrix_and_its_mistakes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "MAX_CHAIN", 0)
    few = {label: composition.LAYERS[label] for label in ("full", "window")}
    monkeypatch.setattr(composition, "LAYERS", few)
    backends = {"slightly_wrong": SlightlyWrong, "elsewhere": Elsewhere, "gone": "not_a_module:Backend"}
    cells = compose(load_plugins(plugins=[plugin("another_plugin", backends=backends)]).registry)
    full = {cell.backend: cell.verdict for cell in cells if cell.layer == "full"}
    expected = {
        "elsewhere": "environment",
        "gone": "import",
        "mla": EQUAL,
        "slightly_wrong": WRONG,
        "torch": EQUAL,
        "torch_reference": EQUAL,
    }
    assert expected == {name: full[name] for name in expected}
    wrong = {cell.layer: cell.detail for cell in cells if cell.verdict == WRONG}
    assert {"full", "full, sharing a cache"} == set(wrong)
    assert "SlightlyWrong on full: mixed: 37 of 37 queries are wrong" in wrong["full"]
    text = render(cells)
    names, window = (
        next(line for line in text.splitlines() if line.startswith(f"| {label} ")) for label in ("layer", "window")
    )
    verdicts = dict(
        zip(*([cell.strip(" `") for cell in line.split("|")[2:-1]] for line in (names, window)), strict=True)
    )
    expected = {"mla": "mask_window", "slightly_wrong": "mask_window", "torch": "equal", "torch_reference": "equal"}
    assert expected == {name: verdicts[name] for name in expected}
    assert not {"elsewhere", "gone"} & {*verdicts}
    _, _, missing = text.partition("## Backends that do not run where this was made\n")
    assert {"- `elsewhere`: `environment`", "- `gone`: `import`"} <= {*missing.splitlines()}


def test_the_command_writes_the_file_and_checks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "MAX_CHAIN", 0)
    monkeypatch.setattr(composition, "LAYERS", {"full": lambda block_size: {}})
    file = tmp_path / "matrix.md"
    assert main([str(file), "--check"]) == 1
    assert f"{file} is not what is installed: run this without --check\n" == capsys.readouterr().err
    assert not file.exists()
    assert main([str(file)]) == 0
    assert main([str(file), "--check"]) == 0
    file.write_text(file.read_text().replace("equal", "wrong", 1))
    assert main([str(file), "--check"]) == 1
