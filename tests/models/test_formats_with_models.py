"""Models with every format give the same tokens as with plain pages of the values that the format reads back.

So pages are stored, hit, moved and copied correctly, for any rounding of the format.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any, ClassVar

import attrs
import pytest
import torch
from kvframe_engine.graphs import sizes as graph_sizes
from kvframe_kv_formats import Fp8Tensor, Fp8TokenHead, Int4TokenHead, Int8TokenHead
from kvframe_torch.backend import TorchBackend

from kvframe import Engine, Prompt, SamplingParams, Stack
from kvframe.contract.errors import BackendError, KVFrameError, SpecError
from kvframe.contract.formats import PLAIN, KVFormat, PlainFormat, StateTensor
from kvframe.loading.plugins import load_plugins
from tests.attention.capturable import CapturableReference
from tests.covering import cover_values, few, keep
from tests.models.encoder_decoder import encoder_inputs
from tests.models.rounding import rounding
from tests.models.serving import GREEDY, PROMPTS, TinyModel, held_pages, served
from tests.support.engines import runner_of
from tests.support.plugins import plugin

FORMATS: tuple[KVFormat, ...] = (Fp8Tensor(), Fp8TokenHead(), Int8TokenHead(), Int4TokenHead())
FAMILIES = {
    "llama": FORMATS,
    "gpt_oss": (Int8TokenHead(), Int4TokenHead()),  # windows, learned sinks
    "gemma2": (Fp8Tensor(k_scale=0.5, v_scale=0.25),),  # soft caps
    "gemma3n_text": (Int4TokenHead(),),  # windows, layers that read others' caches
    "llama4_text": (Fp8TokenHead(),),  # chunks, after a wrapper
    "bamba": (Int8TokenHead(),),  # states beside attention
    "deepseek_v2": (Int8TokenHead(),),  # latents, which have no format
}
CASES = [
    pytest.param(family, kv_format, id=f"{family}-{kv_format.name}")
    for family, some in FAMILIES.items()
    for kv_format in some
]

SMALL_STEPS = {"max_num_batched_tokens": 13, "block_size": 3}
TIGHT = {"max_model_len": 96, "max_num_batched_tokens": 12, "block_size": 5, "max_num_seqs": 8}


def in_stack(kv_format: KVFormat) -> dict[str, Any]:
    """Return a format as it is written in a stack."""
    return {"name": kv_format.name, **attrs.asdict(kv_format)}


@pytest.fixture(scope="module")
def expected(models: Any) -> Any:
    """Return the tokens of a model on plain pages of rounded keys and values, computed once."""
    tokens_by_case: dict[Any, Any] = {}

    def tokens(family: str, kv_format: KVFormat) -> Any:
        if (family, kv_format) not in tokens_by_case:
            with rounding(kv_format), on_torch(models(family)) as engine:
                tokens_by_case[family, kv_format] = served(engine)
        return tokens_by_case[family, kv_format]

    return tokens


def on_torch(model: TinyModel, **options: Any) -> Engine:
    """Return an engine in which the torch backend, which reads no format itself, reads copies of pages."""
    attends = {layer.name for layer in model.loaded.description.layers if layer.query and layer.kind != "mla"}
    everything = attends == {layer.name for layer in model.loaded.description.layers}
    return model.engine(**({"backend": "torch"} if everything else {}), **options)


@pytest.mark.parametrize(("family", "kv_format"), few(4, CASES))
@pytest.mark.parametrize("options", keep([{}, SMALL_STEPS], SMALL_STEPS), ids=["default", "small-steps"])
def test_a_format_equals_plain_pages_of_the_values_that_it_reads_back(
    models: Any, expected: Any, family: str, kv_format: KVFormat, options: dict[str, Any]
) -> None:
    tokens = expected(family, kv_format)
    with on_torch(models(family), format=in_stack(kv_format), **options) as engine:
        formats = {spec.kv_format for group in engine.grouping.groups for spec in group.stored}
        assert formats == (
            {PLAIN} if family == "deepseek_v2" else {kv_format, PLAIN} if family == "bamba" else {kv_format}
        )
        assert tokens == served(engine)


@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda kv_format: kv_format.name)
def test_the_reference_gives_the_tokens_of_the_torch_backend_on_every_format(
    models: Any, expected: Any, kv_format: KVFormat
) -> None:
    tokens = expected("llama", kv_format)
    with models("llama").engine(format=in_stack(kv_format), backend="torch_reference") as engine:
        assert tokens == served(engine)


@pytest.mark.parametrize(
    ("kv_format", "host_memory"),
    few(2, product([Int8TokenHead(), Int4TokenHead()], [None, "1MiB"])),
    ids=lambda value: getattr(value, "name", value),
)
def test_preempted_requests_give_the_same_tokens(
    models: Any, expected: Any, kv_format: KVFormat, host_memory: str | None
) -> None:
    model, tokens = models("gpt_oss"), expected("gpt_oss", kv_format)
    options = {**TIGHT, "format": in_stack(kv_format)}
    memory = model.tight_memory(75, **options)
    with on_torch(model, memory=memory, host_memory=host_memory, **options) as engine:
        assert tokens == served(engine)
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize(("kv_format", "family"), cover_values([Fp8TokenHead(), Int4TokenHead()], ["t5", "whisper"]))
def test_an_encoders_keys_and_values_are_stored_so_too(models: Any, family: str, kv_format: KVFormat) -> None:
    model = models(family)
    prompts = [Prompt(encoder=encoder) for encoder in encoder_inputs(family)]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)

    def tokens(**options: Any) -> list[tuple[int, ...]]:
        with model.engine(backend="torch", block_size=4, max_num_batched_tokens=7, **options) as engine:
            assert {PLAIN if not options else kv_format} == {group.spec.kv_format for group in engine.grouping.groups}
            return [output.token_ids for output in engine.generate(prompts, params)]

    with rounding(kv_format):
        expected_tokens = tokens()
    assert expected_tokens == tokens(format=kv_format.name)


@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda kv_format: kv_format.name)
def test_fewer_bits_change_a_prompts_likelihoods_in_proportion(models: Any, kv_format: KVFormat) -> None:
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=True)

    def logprobs(**options: Any) -> torch.Tensor:
        with models("qwen3").engine(**options) as engine:
            (output,) = engine.generate([PROMPTS[3]], params)
            assert output.prompt_logprobs is not None
            return torch.tensor(output.prompt_logprobs[1:])

    error = float((logprobs(format=kv_format.name) - logprobs()).abs().mean())
    assert (
        0
        < error
        < {"fp8_tensor": 0.3, "fp8_token_head": 0.3, "int8_token_head": 0.03, "int4_token_head": 1.0}[kv_format.name]
    )


@pytest.mark.parametrize(("kv_format", "dtype"), cover_values(FORMATS, ["bfloat16", "float64"]))
def test_a_model_of_any_dtype_is_served(models: Any, kv_format: KVFormat, dtype: str) -> None:
    stack = Stack.from_mapping({"cache": {"memory": "4MiB", "format": kv_format.name}, "model": {"dtype": dtype}})
    with Engine.from_pretrained(models("llama").path, stack=stack) as engine:
        (output,) = engine.generate([PROMPTS[1]], SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert 4 == len(output.token_ids)


# --- the self-check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt_oss", "t5"])
def test_a_model_is_compared_with_itself_on_plain_pages(models: Any, family: str) -> None:
    # With pages of four bits, the logits of these models differ by more than half.
    with models(family).engine(format="int4_token_head", self_check=True) as engine:
        assert "int4_token_head" in {group.spec.kv_format.name for group in engine.grouping.groups}


def test_the_rounding_of_a_format_hides_no_wrong_attention(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = TorchBackend.attend

    @functools.wraps(attend)
    def scaled(self: Any, layer: Any, query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        return attend(self, layer, query * 1.01, *rest, **options)

    monkeypatch.setattr(TorchBackend, "attend", scaled)
    with pytest.raises(
        BackendError, match=r"'kvframe-torch:torch' computes layer 'model\.layers\.0\.self_attn' wrongly"
    ) as failure:
        models("llama").engine(format="int4_token_head", self_check=True, backend="torch")
    assert "allowed 3.5e-04" in str(failure.value.__context__)


# --- wrong formats ----------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Faulty(PlainFormat):
    """Raises after ``after`` calls."""

    name: ClassVar[str] = "faulty"
    calls: ClassVar[list[str]] = []
    function: ClassVar[str]
    after: ClassVar[int]

    def _count(self, function: str) -> None:
        self.calls.append(function)
        if function == self.function and self.calls.count(function) == self.after + 1:
            raise ValueError(f"{function} fails")

    def write(self, *arguments: Any) -> None:
        self._count("write")
        super().write(*arguments)

    def read(self, *arguments: Any) -> None:
        self._count("read")
        super().read(*arguments)


@pytest.mark.parametrize(("after", "function"), cover_values([0, 1, 10], ["write", "read"]))
def test_a_format_that_raises_ends_the_requests_of_the_step_and_nothing_is_left_of_them(
    models: Any, monkeypatch: pytest.MonkeyPatch, function: str, after: int
) -> None:
    model = models("llama")
    expected = [model.reference(prompt) for prompt in PROMPTS]
    for name, value in (("calls", []), ("function", function), ("after", after)):
        monkeypatch.setattr(Faulty, name, value, raising=False)
    registry = load_plugins(plugins=[plugin("theirs", formats={"faulty": Faulty})]).registry
    with attrs.evolve(model, registry=registry).engine(backend="torch", format="faulty", max_num_seqs=2) as engine:
        message = (
            rf"'kvframe-torch:torch', of layer .*: \w+\(\) failed in line \d+ of '{__name__}': Val.*: {function} f"
        )
        with pytest.raises(BackendError, match=message):
            engine.generate(PROMPTS, GREEDY)
        assert not engine.has_unfinished
        assert 0 == held_pages(engine)
        assert expected == served(engine)


def test_a_format_without_state_tensors_is_refused_at_the_start(models: Any) -> None:
    class Silent(PlainFormat):
        name: ClassVar[str] = "silent"

        def state_tensors(self, *sizes: Any) -> Any:
            raise ZeroDivisionError("by zero")

    registry = load_plugins(plugins=[plugin("theirs", formats={"silent": Silent})]).registry
    model = attrs.evolve(models("llama"), registry=registry)
    with pytest.raises(KVFrameError, match=r"'silent': state_tensors\(\) failed: ZeroDivisionError: by zero"):
        model.engine(format="silent")


@pytest.mark.parametrize("shape", [[4], 5])
def test_a_format_with_wrong_shapes_is_refused_at_the_start(models: Any, shape: Any) -> None:
    class Misshapen(PlainFormat):
        name: ClassVar[str] = "misshapen"

        def state_tensors(self, *sizes: Any) -> Any:
            return {"k": StateTensor(shape, "float32"), "v": StateTensor(shape, "float32")}

    registry = load_plugins(plugins=[plugin("theirs", formats={"misshapen": Misshapen})]).registry
    model = attrs.evolve(models("llama"), registry=registry)
    message = r"KV format 'misshapen': state_tensors\(\) is .*; expected .* shapes are tuples of int of at least 1"
    with pytest.raises(SpecError, match=message):
        model.engine(format="misshapen")


@pytest.mark.parametrize("later", [None, {"k": StateTensor((1,), "int8")}], ids=["none", "other"])
def test_a_format_is_asked_once_for_each_of_the_sizes(models: Any, later: Any) -> None:
    calls: list[Any] = []

    class Changing(PlainFormat):
        name: ClassVar[str] = "changing"

        def state_tensors(self, *sizes: Any) -> Any:
            calls.append(sizes)
            return later if calls.count(sizes) > 1 else PlainFormat().state_tensors(*sizes)

    registry = load_plugins(plugins=[plugin("theirs", formats={"changing": Changing})]).registry
    model = attrs.evolve(models("llama"), registry=registry)
    params = SamplingParams(max_new_tokens=3)
    with model.engine() as plain:
        expected_tokens = plain.generate([[1, 2, 3]], params)[0].token_ids
    with model.engine(format="changing") as engine:
        assert (expected_tokens, 1) == (engine.generate([[1, 2, 3]], params)[0].token_ids, len(calls))


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", keep(["llama", "gpt_oss", "llama4_text"], "gpt_oss", "llama4_text"))
def test_steps_that_are_replayed_copy_the_pages_of_each_step(
    models: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_sizes, "SHORTEST_CONTEXT", 18)
    registry = load_plugins(plugins=[plugin("mine", backends={"capturable": CapturableReference})]).registry
    model = attrs.evolve(models(family), registry=registry)
    options = {"backend": "capturable", "format": "int8_token_head"}
    with model.engine(**options) as engine:
        expected = served(engine)
    with model.engine(**options, graphs=[2, 4, 8]) as engine:
        assert {True} == {choice.on_copies for choice in engine.choices}
        assert expected == served(engine)
        runner: Any = runner_of(engine)
        assert runner.graphs.num_replays >= 4


def test_copies_of_a_graph_that_would_take_more_than_those_of_all_pages_are_not_made(
    models: Any, caplog: pytest.LogCaptureFixture
) -> None:
    registry = load_plugins(plugins=[plugin("mine", backends={"capturable": CapturableReference})]).registry
    model = attrs.evolve(models("llama"), registry=registry)
    memory = model.tight_memory(80)
    options = {"backend": "capturable", "format": "int8_token_head", "memory": memory, "max_model_len": 96}
    with model.engine(**options) as engine:
        expected = served(engine)
    with model.engine(**options, graphs=[1, 8]) as engine:
        assert expected == served(engine)
        runner: Any = runner_of(engine)
        assert {1} == {sizes.num_reqs for sizes in runner.graphs._graphs}
    assert any("steps of 8 requests run without a graph: copies of" in record.message for record in caplog.records)
