"""Properties of a step that only a GPU shows: no wait for it, a single copy, and graphs with equal results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvframe_engine.requests.request import SamplingParams

from kvframe import Engine, Setup, load_plugins
from kvframe.attention.batch_metadata import StepBatch
from kvframe.planning.recognise import find_adapter
from tests.attention.capturable import CapturableReference
from tests.support.plugins import plugin

pytest.importorskip("transformers", reason="tiny models are made by transformers")
from kvframe_transformers.testing import save_tiny

from tests.models.serving import PROMPTS, TinyModel, make_stack
from tests.support.engines import manager_of, runner_of

pytestmark = pytest.mark.gpu
FAMILIES = ("llama", "gemma3_text", "llama4_text", "gemma3n_text")


def on_gpu(folder: Path, family: str, **options: Any) -> Engine:
    save_tiny(folder, family)
    registry = load_plugins(plugins=[plugin("mine", backends={"capturable": CapturableReference})]).registry
    loaded = find_adapter(folder, registry).load(folder, device="cuda", dtype="float32")
    stack = make_stack(device="cuda", **options)
    return Engine(loaded, Setup.of(loaded.description, stack, registry, dtype="float32"))


def test_what_cannot_be_captured_runs_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # It declares that it can be captured, but reads values of the device.
    params = SamplingParams(max_new_tokens=4)
    with on_gpu(tmp_path / "off", "llama", backend="capturable") as engine:
        expected = [output.token_ids for output in engine.generate(PROMPTS[:3], params)]
    with on_gpu(tmp_path / "graphs", "llama", backend="capturable", graphs=[4]) as engine:
        assert expected == [output.token_ids for output in engine.generate(PROMPTS[:3], params)]
    assert 1 == len([record for record in caplog.records if "without a graph" in record.message])


DECODES = (1, 1, 1, 1)
STEPS = {"decodes": (DECODES, "off"), "mixed": ((1, 1, 20, 1), "off"), "replayed": (DECODES, [4])}
"""By name: the tokens that the requests compute, and the numbers of requests of the graphs."""


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_waits_for_nothing_and_is_copied_at_once(tmp_path: Path, family: str, name: str) -> None:
    pytest.importorskip("kvframe_triton")
    num_new, graphs = STEPS[name]
    with on_gpu(tmp_path, family, backend="triton", graphs=graphs) as engine:
        runner: Any = runner_of(engine)
        for index, count in enumerate(num_new):
            manager_of(engine).start(str(index), [0] * 64)
            assert manager_of(engine).extend(str(index), 29 + index + count)
            runner.set_row(manager_of(engine).row(str(index)), [1] * 64)
        rows = np.array([manager_of(engine).row(str(index)) for index in range(4)])
        query_lens = np.array(num_new, dtype=np.int64)
        step = StepBatch(
            rows=rows,
            num_computed=np.arange(29, 33),
            query_lens=query_lens,
            generating_indices=np.cumsum(query_lens) - 1,
        )
        runner.forward(step)  # kernels are compiled, memory is pinned, graphs captured
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            runner.forward(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            runner.forward(step)
            torch.cuda.synchronize()
        assert 1 == len([event for event in profile.events() if "HtoD" in event.name])
        assert graphs == "off" or runner.graphs.num_replays >= 2


def test_tiny_models_run_on_the_gpu_as_on_the_host(tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=8)
    with TinyModel.save(tmp_path / "host", "gemma3_text").engine() as engine:
        expected = [output.token_ids for output in engine.generate(PROMPTS, params)]
    with on_gpu(tmp_path / "gpu", "gemma3_text") as engine:
        assert expected == [output.token_ids for output in engine.generate(PROMPTS, params)]
