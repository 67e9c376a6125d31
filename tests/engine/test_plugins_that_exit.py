"""A plugin that exits, interrupts or runs out of memory in a step: its engine serves on, and no block stays held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy.typing as npt
import pytest
import torch
from kvframe_engine.contract import DraftRequest, Proposer
from kvframe_testing.audit import audit

from kvframe import Engine, SamplingParams, Setup, Stack, load_plugins
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract import ModelError
from kvframe.contract.backend import AttentionMetadataBuilder
from kvframe.contract.eviction import LRU, EvictionPolicy, ReleasedPages
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import TokenRange
from kvframe.contract.wrapper import FieldUse, MetadataWrapper
from tests.engine.scripted_model import ScriptedModel
from tests.support.engines import manager_of
from tests.support.plugins import plugin

SCRIPT = "the quick brown fox jumps over the lazy dog"


MOST_STEPS = 40


class Exit(BaseException):
    """What a plugin calls its own way out."""


ERRORS = [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError, Exit]


@attrs.define
class Fault:
    """Raises an error once, at the chosen place.

    Attributes:
        place: The place; empty if nothing is to be raised.
        error: What is raised there.
    """

    place: str = ""
    error: BaseException = attrs.field(factory=SystemExit)

    def arm(self, place: str, error: BaseException) -> None:
        self.place, self.error = place, error

    def reach(self, place: str) -> None:
        if place == self.place:
            self.place = ""
            raise self.error


FAULT = Fault()


@pytest.fixture(autouse=True)
def _no_fault() -> None:
    FAULT.arm("", SystemExit())


class Model(ScriptedModel):
    def encode(self, text: str) -> list[int]:
        FAULT.reach("encode")
        return super().encode(text)

    def decode(self, token_ids: Sequence[int]) -> str | None:
        FAULT.reach("decode")
        return super().decode(token_ids)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        FAULT.reach("forward")
        return super().forward(input_ids, positions, logits_indices)


@attrs.frozen(kw_only=True)
class Spec(FullAttentionSpec):
    kind = "exits"

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        FAULT.reach("live_ranges")
        return super().live_ranges(n)


class Builder(AttentionMetadataBuilder):
    def build(self, metadata: CommonAttentionMetadata) -> Any:
        FAULT.reach("build")
        return metadata

    def finish(self, built: Any) -> Any:
        FAULT.reach("finish")
        return built


class Backend(TorchReferenceBackend):
    def make_builder(self) -> AttentionMetadataBuilder:
        return Builder()


@attrs.frozen(kw_only=True)
class Wrapper(MetadataWrapper):
    name: ClassVar[str] = "exits"
    fields: ClassVar[Mapping[str, FieldUse]] = {
        field.name: FieldUse.CARRY for field in attrs.fields(CommonAttentionMetadata) if field.name != "extensions"
    }

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        FAULT.reach("wrapper")
        return metadata


@attrs.define(kw_only=True, eq=False)
class Drafts(Proposer):
    name = "exits"

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        FAULT.reach("propose")
        return [list(SCRIPT.encode())[len(each.token_ids) :][: each.max_drafts] for each in requests]

    def forget(self, request_ids: Sequence[str]) -> None:
        FAULT.reach("forget")


@attrs.frozen(kw_only=True)
class Policy(EvictionPolicy):
    name = "exits"

    def priorities(self, pages: ReleasedPages) -> npt.NDArray[Any]:
        FAULT.reach("priorities")
        return LRU.priorities(pages)


def make_engine() -> Engine:
    """Return an engine of the scripted model with plugins that reach the fault's places."""
    model = Model(SCRIPT)
    (layer,) = model.description.layers
    model.description = attrs.evolve(model.description, layers=(attrs.evolve(layer, kind="exits"),))
    stack = Stack.from_mapping(
        {
            "cache": {"block_size": 4, "memory": 16 * 1024, "eviction": "exits"},
            "model": {"drafts": "exits"},
            "engine": {"self_check": False},
            "rules": [{"layers": "*", "backend": "exits", "wrappers": ["exits"]}],
        }
    )
    parts = {"specs": Spec, "backends": Backend, "wrappers": Wrapper, "proposers": Drafts, "eviction_policies": Policy}
    plugins = [plugin("exits", **{kind: {"exits": part} for kind, part in parts.items()})]
    registry = load_plugins(plugins=plugins).registry

    engine = Engine(model, Setup.of(model.description, stack, registry, dtype="float32"))
    engine.on_cache_events = lambda events: FAULT.reach("listener")
    return engine


def serve(engine: Engine, prompt: str) -> list[BaseException]:
    """Serve a request of two samples to its end; return what the engine raised meanwhile."""
    raised: list[BaseException] = []

    def note(act: Callable[[], Any]) -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    note(lambda: engine.add_request(prompt, SamplingParams(n=2, max_new_tokens=12, stop="n")))
    for _ in range(MOST_STEPS):
        if engine.has_unfinished:
            note(engine.step)
    assert not engine.has_unfinished
    return raised


NOTHING_FAILS, ERROR_IS_RAISED = "", "raised"
PLACES: Mapping[str, str] = {
    "encode": "the tokenizer failed: ",
    "forward": ERROR_IS_RAISED,
    "build": "backend 'exits:exits', of layer 'layer': its builder's build() failed ",
    "finish": "backend 'exits:exits', of layer 'layer': its builder's finish() failed ",
    "wrapper": "wrapper 'exits', of the layer 'layer', failed: ",
    "propose": NOTHING_FAILS,
    "forget": NOTHING_FAILS,
    "priorities": NOTHING_FAILS,
    "live_ranges": NOTHING_FAILS,
    "decode": NOTHING_FAILS,
    "listener": NOTHING_FAILS,
}
"""The places where plugins may raise, and how the error begins that the engine raises then."""

IN_ITS_TURN = {"encode", "forward", "build", "finish", "wrapper", "listener"}
"""The places where Ctrl-C may be pressed. At the others it waits, so a ``KeyboardInterrupt`` there is the plugin's."""


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_what_a_plugin_raises_ends_the_requests_of_its_step_at_most(place: str, kind: type[BaseException]) -> None:
    error = kind("no")
    with make_engine() as engine:
        assert [] == serve(engine, "the quick brown")
        FAULT.arm(place, error)
        raised = serve(engine, "the quick brown fox jum")
        assert "" == FAULT.place
        is_own_way_out = not isinstance(error, Exception | KeyboardInterrupt)
        if PLACES[place] == ERROR_IS_RAISED and is_own_way_out:
            (failed,) = raised
            expected = f"{engine.model.description.name}: a step failed: {kind.__name__}: no"
            assert (ModelError, expected, error) == (type(failed), str(failed), failed.__cause__)
        elif PLACES[place] == ERROR_IS_RAISED or (isinstance(error, KeyboardInterrupt) and place in IN_ITS_TURN):
            assert [error] == raised
        else:
            assert ([PLACES[place]] if PLACES[place] else []) == [str(each)[: len(PLACES[place])] for each in raised]
        assert [] == serve(engine, "the quick")
        assert ["k bro"] == [output.text for output in engine.generate(["the quic"], SamplingParams(max_new_tokens=5))]
        assert {0} == set(engine.stats().blocks_held)
        audit(manager_of(engine))


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, ValueError])
def test_a_model_that_exits_at_the_start_ends_it_with_an_error(kind: type[BaseException]) -> None:
    error = kind("no")

    class Exiting(ScriptedModel):
        def self_check(self, run_packed: Any) -> None:
            raise error

    with pytest.raises(ModelError if kind is SystemExit else kind) as failed:
        Exiting(SCRIPT).engine()
    assert error in (failed.value, failed.value.__cause__)
    if kind is SystemExit:
        assert str(failed.value).endswith(" cannot be attached: SystemExit: no")
