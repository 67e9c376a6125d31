"""The matrix of models: kind of model, wrapper chain, format, drafts, graphs and compilation, each cell run.

``python -m tests.models.composition plugins/COMPOSITION_OF_MODELS.md`` runs all cells and writes the matrix.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import MagicMock, patch

import attrs
import torch

from kvframe import Embedder, Engine, KVFrameError, SamplingParams, Setup, load_plugins
from kvframe.contract.formats import PLAIN
from tests.attention.capturable import CapturableReference
from tests.models import by_content, encoder_decoder
from tests.models.headed import save_headed
from tests.models.kept_code import KeptCode
from tests.models.serving import TinyModel, held_pages, ids, make_stack
from tests.support.engines import draft_of, runner_of
from tests.support.plugins import plugin

EQUAL, WRONG = "equal", "WRONG"
BACKEND = "capturable"
"""The reference in any dtype, restricted to tensors at fixed addresses, so that its steps can be replayed."""

PROMPTS = (ids(2, 9), ids(5, 40), [*ids(3, 9), *ids(3, 9)], ids(3, 20))
"""Shorter and longer than windows, chunks and blocks. One repeats itself, and shares its beginning with another."""
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
NGRAM = {"name": "ngram", "max_drafts": 3, "min_match": 1, "shared_tokens": 1000}
"""Single tokens match, so most drafts are wrong. The second time that a prompt is served, most are right."""


def skipping(**options: Any) -> dict[str, Any]:
    """Return options of an engine whose layers that share a cache compute the generating tokens only."""
    return {"prefill_skipping": "decode_only", **options}


def in_chunks(wrapped: bool, retyped: str | None = None) -> dict[str, Any]:
    """Return options for layers that attend to their own chunk, after the wrapper for it or directly.

    Args:
        wrapped: Whether the wrapper comes first.
        retyped: The kind of layers that become such layers; None if the model has some.
    """
    changed = {} if retyped is None else {retyped: {"spec": {"kind": "chunked_local", "chunk": 8}}}
    return {"of_kinds": {**changed, "chunked_local": {"wrappers": ["chunked_local"] if wrapped else []}}}


SINKS: Mapping[str, Any] = {
    "full_attention": {"spec": {"kind": "sliding_window", "window": 8, "num_sink_tokens": 3}},
    "sliding_window": {},
}


@attrs.frozen(kw_only=True)
class Kind:
    """A kind of model.

    Attributes:
        family: The family of the tiny model.
        chains: Options of its engine by wrapper chain. Those of ``retyped`` change what the model computes.
        retyped: Whether the options change types of layers, so that transformers does not compute the same.
        has_keys: Whether a layer keeps keys and values, which have a format.
        generates: Whether the model generates tokens; otherwise it gives embeddings.
        num_heads: Its prediction heads, which then make the drafts.
        by_content: Whether its attention chooses by content: then it is neither captured nor compiled.
    """

    family: str
    chains: Mapping[str, Mapping[str, Any]] = MappingProxyType({"": {}})
    retyped: bool = False
    has_keys: bool = True
    generates: bool = True
    num_heads: int = 0
    by_content: bool = False

    @property
    def drafts(self) -> Any:
        """The proposer of drafts."""
        return "mtp" if self.num_heads else NGRAM


KINDS: Mapping[str, Kind] = {
    "full attention": Kind(family="llama"),
    "windows": Kind(family="gemma3_text"),
    "windows and learned sinks": Kind(family="gpt_oss"),
    "windows and sink tokens": Kind(family="llama", retyped=True, chains={"": {"of_kinds": SINKS}}),
    "chunks": Kind(family="llama4_text", chains={"": in_chunks(False), "chunked_local": in_chunks(True)}),
    "latents": Kind(family="minicpm3", has_keys=False),
    "latents and experts": Kind(family="deepseek_v3", has_keys=False),
    "prediction heads": Kind(family="glm4_moe", num_heads=2),
    "Mamba": Kind(family="mamba", has_keys=False),
    "Mamba-2": Kind(family="mamba2", has_keys=False),
    "Mamba beside attention": Kind(family="jamba"),
    "Mamba-2 beside attention": Kind(family="falcon_h1"),
    "gated delta beside attention": Kind(family="qwen3_next"),
    "delta attention beside latents": Kind(family="kimi_linear", has_keys=False),
    "short convolutions beside attention": Kind(family="lfm2"),
    "shared caches": Kind(family="gemma3n_text", chains={"": {}, "decode_only": skipping()}),
    "shared caches of chunks": Kind(
        family="gemma3n_text",
        retyped=True,
        chains={
            "": in_chunks(False, "sliding_window"),
            "chunked_local": in_chunks(True, "sliding_window"),
            "decode_only": skipping(**in_chunks(False, "sliding_window")),
            "decode_only → chunked_local": skipping(**in_chunks(True, "sliding_window")),
        },
    ),
    "encoder and decoder": Kind(family="bart"),
    "encoder and decoder, relative bias": Kind(family="t5"),
    "encoder of sound and decoder": Kind(family="whisper"),
    "chosen latents": Kind(family="deepseek_v32", has_keys=False, by_content=True),
    "chosen latents beside windows": Kind(family="dots3_note_text", by_content=True),
    "chosen blocks": Kind(family="minimax_m3_vl_text", by_content=True),
    "pooled index keys beside linear attention": Kind(family="qwen4_exp_text", by_content=True),
    "compressed tokens beside windows": Kind(family="deepseek_v4", by_content=True),
    "encoder alone": Kind(family="bert", has_keys=False, generates=False),
}
"""Every kind of model by name."""

FORMATS = ("plain", "fp8_tensor", "fp8_token_head", "int8_token_head", "int4_token_head")
WITH_ENCODER = ("bart", "t5", "whisper")


@attrs.frozen
class Cell:
    """What one engine is asked for.

    Attributes:
        kind: A name of ``KINDS``.
        chain: One of its chains.
        kv_format: The format of keys and values.
        drafts: Whether n-grams or prediction heads propose drafts.
        graphs: Whether steps are replayed from graphs.
        compiled: Whether the model is compiled around its layers.
    """

    kind: str
    chain: str
    kv_format: str
    drafts: bool = False
    graphs: bool = False
    compiled: bool = False

    @property
    def plain(self) -> Cell:
        """The cell without drafts, graphs and compilation."""
        return Cell(self.kind, self.chain, self.kv_format)

    @property
    def codes(self) -> frozenset[str]:
        """The codes of refusals that the cell may have; with another code it is wrong."""
        kind, codes = KINDS[self.kind], set()
        if not kind.generates and (self.drafts or self.graphs):
            codes.add("nothing_generated")
        if kind.by_content and self.graphs:
            codes.add("not_captured")
        if kind.by_content and self.compiled:
            codes.add("not_compiled")
        return frozenset(codes)


SWITCHES = ((False, False), (True, False), (False, True), (True, True))
"""Drafts and graphs."""


def cells() -> Iterator[Cell]:
    """Yield every cell, in the order of the matrix."""
    for kind, traits in KINDS.items():
        for chain, kv_format in itertools.product(traits.chains, FORMATS if traits.has_keys else FORMATS[:1]):
            for compiled, switches in itertools.product((False, True), SWITCHES):
                yield Cell(kind, chain, kv_format, *switches, compiled)


class CountingCompiler:
    """A compiler for torch that runs graphs as they were traced.

    Attributes:
        num_runs: Runs of its graphs.
    """

    def __init__(self) -> None:
        """Begin to count."""
        self.num_runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs a graph."""

        def run(*inputs: Any) -> Any:
            self.num_runs += 1
            return graph.forward(*inputs)

        return run


class Models:
    """Runs cells on tiny models in float64, which are made once each.

    A compiled model calls its layers as operators: its graph depends neither on their pages nor on what they see of
    them. So a model is compiled once for all its cells, and once more for those that leave rows out, or use heads.
    """

    def __init__(self, folder: Path) -> None:
        """Take the folder of the models."""
        self._folder = folder
        self._registry = load_plugins(plugins=[plugin("mine", backends={BACKEND: CapturableReference})]).registry
        self.model = cache(self._make)
        self.expected = cache(self._expect)
        self._compiled: dict[tuple[str, tuple[str, ...], bool], KeptCode] = {}
        self._compiler = CountingCompiler()

    def _make(self, family: str) -> TinyModel:
        if family in by_content.FAMILIES:
            return attrs.evolve(by_content.save(self._folder / family, family), registry=self._registry)
        (num_heads,) = {traits.num_heads for traits in KINDS.values() if traits.family == family}
        saved = attrs.evolve(TinyModel.save(self._folder / family, family), registry=self._registry)
        if num_heads:
            # The last head is wrong, so that drafts are accepted and rejected.
            save_headed(self._folder / family, family, num_heads, agrees=True, num_wrong=1)
        exact = saved.in_dtype("float64")
        loaded: Any = exact.loaded
        if hasattr(loaded.model.config, "num_experts_per_tok") or hasattr(loaded.model.config, "num_experts_per_token"):
            loaded.model.set_experts_implementation("batched_mm")  # others do not take float64, or end a graph
        return exact

    def judge(self, cell: Cell) -> tuple[str, str]:
        """Return a cell's verdict (``EQUAL``, ``WRONG`` or the code of a refusal), and why it is not equal.

        A cell is refused only with one of its ``codes``: any other error is a mistake.
        """
        try:
            results, why = self._run(cell)
            if not why and not _are_same(results, self.expected(cell.plain)):
                why = f"{results}, not {self.expected(cell.plain)}"
            return (WRONG, why) if why else (EQUAL, "")
        except Exception as error:
            code = getattr(error, "code", None) if isinstance(error, KVFrameError) else None
            return (code, str(error)) if code in cell.codes else (WRONG, traceback.format_exc())

    def _expect(self, cell: Cell) -> list[Any]:
        """Return what a cell without drafts, graphs and compilation gives; by transformers, if it can be."""
        kind = KINDS[cell.kind]
        model = self.model(kind.family)
        loaded: Any = model.loaded
        if not kind.generates:
            with torch.inference_mode():
                states = [loaded.model(torch.tensor([prompt])).last_hidden_state[0].mean(0) for prompt in PROMPTS]
            return [state.tolist() for state in states]
        if kind.retyped or cell.kv_format != "plain":
            results, why = self._run(
                Cell(cell.kind, next(iter(kind.chains)), cell.kv_format), backend="torch_reference"
            )
            assert not why, why
            return results
        if kind.family in WITH_ENCODER:
            prompts = encoder_decoder.prompts(kind.family)[:4]
            return [encoder_decoder.generated(model, kind.family, prompt, PARAMS.max_new_tokens) for prompt in prompts]
        return [model.reference(prompt, PARAMS.max_new_tokens) for prompt in PROMPTS]

    def _run(self, cell: Cell, backend: str = BACKEND) -> tuple[list[Any], str]:
        """Return what a cell's engine gives, and what it did not do that it was asked for."""
        kind = KINDS[cell.kind]
        model, options = self.model(kind.family), {**kind.chains[cell.chain]}
        attending = {layer.kind for layer in model.loaded.description.layers if layer.query}
        of_kinds = options.pop("of_kinds", {})
        rules = {
            name: {"backend": backend, "optional": True, **of_kinds.get(name, {})}
            for name in sorted({*attending, *of_kinds} - {"mla", "encoder_only"})
        }
        options |= {"format": cell.kv_format, "rules": rules, "drafts": kind.drafts if cell.drafts else None}
        if cell.graphs:
            options |= {"graphs": [4], "graph_query_lens": [1]}
        if not kind.generates:
            return self._embed(cell, model, options)
        with model.engine(**options) as engine:
            prompts: Any = PROMPTS
            if kind.family in WITH_ENCODER:
                prompts = encoder_decoder.prompts(kind.family)[:4]
            with self._compiled_if(cell, engine.model, draft_of(engine)) as not_compiled:
                served = [[output.token_ids for output in engine.generate(prompts, PARAMS)] for _ in range(2)]
            why = _not_done(engine, cell) or not_compiled()
            return served[0], why or ("" if served[0] == served[1] else "tokens, the second time")

    @contextmanager
    def _compiled_if(self, cell: Cell, model: Any, heads: Any = None) -> Iterator[Callable[[], str]]:
        """Compile a model, and its prediction heads if they are used, if the cell asks for it.

        Yields:
            A function that returns which steps inside the block did not run as one graph; empty if all did.
        """
        if not cell.compiled:
            yield str
            return
        self._compile(model, KINDS[cell.kind].family)
        self._compiler.num_runs = 0
        if heads is None:
            with patch.object(model, "forward", wraps=model.forward) as steps:
                yield lambda: _not_compiled(self._compiler, steps)
            return
        of_heads = CountingCompiler()
        heads.compile(of_heads)
        of_heads.num_runs = 0
        with (
            patch.object(model, "forward", wraps=model.forward) as steps,
            patch.object(heads, "forward_head", wraps=heads.forward_head) as steps_of_heads,
        ):
            yield lambda: _not_compiled(self._compiler, steps) or _not_compiled(of_heads, steps_of_heads)

    def _compile(self, model: Any, family: str) -> None:
        """Compile an attached model, or give it the code that it was compiled to before."""
        key = family, tuple(model._layers.skipped), model._noted is not None
        if key in self._compiled:
            self._compiled[key].put_on(model)
        else:
            model.compile(self._compiler)
            self._compiled[key] = KeptCode(model)

    def _embed(self, cell: Cell, model: TinyModel, options: Mapping[str, Any]) -> tuple[list[Any], str]:
        stack = make_stack(**options)
        with Embedder(
            model.loaded,
            Setup.of(model.loaded.description, stack, model.registry, dtype=model.dtype),
            poison_freed=True,
        ) as embedder:
            with self._compiled_if(cell, embedder.model) as not_compiled:
                embeddings = [output.embedding for output in embedder.embed(PROMPTS)]
            return embeddings, "drafts or graphs are ignored" if cell.drafts or cell.graphs else not_compiled()


def _not_compiled(compiler: CountingCompiler, steps: MagicMock) -> str:
    """Return how many steps did not run as one graph; empty if all did."""
    is_compiled = 0 < steps.call_count == compiler.num_runs
    return "" if is_compiled else f"{compiler.num_runs} graphs ran in {steps.call_count} steps"


def _are_same(results: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return whether tokens are the same, and embeddings as near as float32 can tell."""
    if isinstance(results[0][0], int):
        return [*results] == [*expected]
    return all(
        torch.allclose(torch.tensor(result), torch.tensor(other))
        for result, other in zip(results, expected, strict=True)
    )


def _not_done(engine: Engine, cell: Cell) -> str:
    """Return what an engine did not do; empty if it did all that the cell asks for."""
    stats = engine.stats()
    runner: Any = runner_of(engine)
    of_heads = runner.draft.runners if cell.drafts and KINDS[cell.kind].num_heads else ()
    formats = {spec.kv_format for group in engine.grouping.groups for spec in group.stored}
    if held_pages(engine):
        return "pages are held after the last request"
    if (cell.kv_format != "plain") != bool(formats - {PLAIN}):
        return f"the cache has the formats {formats}"
    if cell.drafts and not 0 < stats.accepted_draft_tokens < stats.draft_tokens:
        return f"{stats.accepted_draft_tokens} of {stats.draft_tokens} drafts were accepted"
    for step_runner in (runner, *of_heads):
        if cell.graphs and (step_runner.graphs._reasons or not step_runner.graphs.num_replays):
            return f"{step_runner.graphs.num_replays} replays; {step_runner.graphs._reasons}"
    return ""


# --- the file ---------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
# Which models compose with what

Every kind of model, after every wrapper chain that applies to it, with every format of its keys and values; each with
and without draft tokens (d), steps that are replayed from graphs (g), and compilation (c). A cell says one of two
things:

- equal: the generated tokens are those of transformers' own `generate()` in float64. With another format than `plain`,
  and for a model whose layers were given another type, they are those of the reference backend without drafts, graphs,
  compilation and wrappers. Drafts were accepted and rejected, steps were replayed, and each step of a compiled model
  ran as one compiled graph. If a model has prediction heads, the drafts are theirs, and all of this holds for the heads
  too. An encoder alone gives embeddings: the means of the hidden states of transformers;
- a `code`: refused, with a sentence. [Refusals](../docs/refusals.md) explains each code. Only two kinds of models are
  refused anything: drafts, and graphs of some sizes, of those that generate nothing; graphs and compilation of those
  that choose by content.

Latents and states have no format, so a model that keeps nothing else has one row for all formats. Backends differ in
what they attend to, not in what composes: [which wrappers and backends compose](COMPOSITION.md).

It was made with `python -m tests.models.composition plugins/COMPOSITION_OF_MODELS.md`.
"""
_COLUMNS = {
    "none": (False, False, False),
    "d": (True, False, False),
    "g": (False, True, False),
    "dg": (True, True, False),
    "c": (False, False, True),
    "dc": (True, False, True),
    "gc": (False, True, True),
    "dgc": (True, True, True),
}
_HEAD = ["model", "wrappers", "format", *_COLUMNS]


def render(verdicts: Mapping[Cell, str]) -> str:
    """Return the matrix as Markdown: a row for each kind, chain and format, a column for each choice of switches."""
    rows = [_HEAD]
    for plain in dict.fromkeys(cell.plain for cell in cells()):
        labels = plain.kind, plain.chain, plain.kv_format
        row_verdicts = [verdicts[Cell(*labels, *switches)] for switches in _COLUMNS.values()]
        row_cells = [verdict if verdict in (EQUAL, WRONG) else f"`{verdict}`" for verdict in row_verdicts]
        rows.append([plain.kind, plain.chain or "none", plain.kv_format, *row_cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = (" | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return INTRODUCTION + "\n" + "".join(f"| {line} |\n" for line in lines)


def read(text: str) -> dict[Cell, str]:
    """Return the verdicts of a rendered matrix."""
    verdicts_by_cell = {}
    for line in text.splitlines():
        parts = [part.strip(" `") for part in line.strip("|").split("|")]
        if line.startswith("| ") and parts != _HEAD and set(parts[0]) != {"-"}:
            kind, chain, kv_format, *verdicts = parts
            for switches, verdict in zip(_COLUMNS.values(), verdicts, strict=True):
                verdicts_by_cell[Cell(kind, "" if chain == "none" else chain, kv_format, *switches)] = verdict
    return verdicts_by_cell


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every cell, and write the matrix; return 1 if a cell is wrong, or refused with a code that is not its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.composition", description=main.__doc__)
    parser.add_argument("file", type=Path, help="where the matrix is written, as Markdown")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    verdicts, is_wrong = {}, False
    with tempfile.TemporaryDirectory() as folder:
        models = Models(Path(folder))
        for cell in cells():
            verdicts[cell], why = models.judge(cell)
            if verdicts[cell] == WRONG:
                is_wrong = True
                print(f"{cell}: {why}", file=sys.stderr)
    options.file.write_text(render(verdicts), encoding="utf-8")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
