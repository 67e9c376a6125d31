"""A program that runs engines over ranks, each a process, and prints what came of them; ``test_ranks`` reads it.

The processes are forked after everything is imported, so that a pair of them costs little.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import attrs
import torch
from kvframe_engine.contract import DraftRequest
from kvframe_engine.contract.errors import EngineError
from kvframe_engine.ranks import links
from kvframe_engine.ranks.follower import Follower
from kvframe_engine.requests.output import RequestOutput
from kvframe_engine.tiers import tiers
from kvframe_transformers import adapter  # noqa: F401  # imported before the processes are forked
from transformers import AutoModelForCausalLM

from kvframe import Embedder, Engine, SamplingParams, Stack
from kvframe.contract.errors import KVFrameError
from tests.loading.fake_distributions import FakeSite
from tests.models.knowing import ANSWERS, Knowing
from tests.models.serving import GREEDY, PROMPTS, held_pages, make_stack
from tests.support.engines import fetcher_of, requests_of, runner_of, scheduler_of
from tests.support.overlap import EXTRAS, call_at_random, on_queue
from tests.support.plugins import plugin
from tests.support.ports import free_port
from tests.support.stores import SHELVES, Shelf, shelf_plugin

Result = dict[str, Any]

STORED = ("llama", "gemma3_text", "deepseek_v2", "mamba2")
"""Families whose pages are stored: full attention, windows, latents and states."""

ASKED = "KVFRAME_TEST_ASKED"
"""The environment variable with the names of the cases and of the stored families that a run computes."""

MOST_SECONDS = 10
"""How long a rank may stay after the other has ended."""


@attrs.define(kw_only=True, eq=False)
class Reading(Knowing):
    """Knows some of what requests will generate, and reads the last tokens from the hidden states.

    Attributes:
        model: The folder of the served model, whose head it loads whole.
        records: The tokens that it read, and those that there are.
        num_missing: The requests without hidden states.
    """

    name = "reading"
    needs_hidden_states: ClassVar[bool] = True

    model: str
    records: list[tuple[list[int], list[int]]] = attrs.field(factory=list, init=False)
    num_missing: int = attrs.field(default=0, init=False)
    head: Any = attrs.field(default=None, init=False)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        self.head = self.head or AutoModelForCausalLM.from_pretrained(self.model).get_output_embeddings()
        for request in requests:
            if request.hidden_states is None:
                self.num_missing += 1
                continue
            with torch.inference_mode():
                read = self.head(request.hidden_states).argmax(-1).tolist()
            self.records.append((read, list(request.token_ids[-len(read) :])))
        return super().propose(requests)


@attrs.define(kw_only=True, eq=False)
class Noting(Knowing):
    """Knows some of what requests will generate, and notes what the prediction heads draft for them.

    Attributes:
        records: For each request that was continued, its number of tokens and what the heads drafted.
    """

    name = "noting"
    uses_prediction_heads: ClassVar[bool] = True

    records: list[tuple[int, list[int]]] = attrs.field(factory=list, init=False)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        self.records += [(len(request.token_ids), list(request.continuation)) for request in requests]
        return super().propose(requests)


def engine_of(path: Path, *, plugins: Sequence[ModuleType] = (), **options: Any) -> Engine:
    stack = make_stack(**{"block_size": 4, **options})
    return Engine.from_pretrained(path, stack=stack, plugins=plugins, poison_freed=True)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.token_ids) for output in outputs]


def share_of(memory: int) -> int:
    """Return a rank's share of the memory: it has half of the heads."""
    return memory // 2 if "WORLD_SIZE" in os.environ else memory


def share_beside_draft(memory: int) -> int:
    """Return a rank's share of the memory of two models of one size: half of the served one, and the whole draft."""
    return memory * 3 // 4 if "WORLD_SIZE" in os.environ else memory


def drafts_of(folder: Path, draft: str) -> Result:
    return {"name": "draft_model", "model": str(folder / draft)}


def counts_of(engine: Engine) -> Result:
    """Return an engine's counters, except bytes; a request that reads a wrong page is computed again, which counts."""
    assert 0 == held_pages(engine)
    return {key: value for key, value in engine.stats().to_dict().items() if "bytes" not in key}


# --- what is compared with one process --------------------------------------------------------------------------------


def serve_llama(folder: Path, family: str = "llama", **options: Any) -> Result:
    """Chunked prompts with prefix hits, then samples that fork, and a prompt's likelihoods."""
    with engine_of(folder / family, max_num_batched_tokens=24, self_check=True, **options) as engine:
        first = tokens_of(engine.generate(PROMPTS, GREEDY))
        again = tokens_of(engine.generate(PROMPTS, GREEDY))
        cached = engine.stats().cached_prompt_tokens
        sampling = SamplingParams(n=3, temperature=1.5, seed=5, max_new_tokens=6)
        samples = tokens_of(engine.generate([[*PROMPTS[3][:50], 1, 2, 3, 4, 5]], sampling))
        scoring = SamplingParams(prompt_logprobs=True, top_logprobs=2, max_new_tokens=1)
        (scored,) = engine.generate(PROMPTS[1:2], scoring)
        assert scored.prompt_logprobs is not None
        assert scored.prompt_top_logprobs is not None
        return {
            "first": first,
            "again": again,
            "cached": cached,
            "samples": samples,
            "likely": [round(value, 3) for value in scored.prompt_logprobs[1:] if value is not None],
            "most likely": [
                round(value, 3) for top in scored.prompt_top_logprobs[1:] for value in (top or {}).values()
            ],
            "counts": counts_of(engine),
        }


def draft_llama(folder: Path) -> Result:
    """Likewise, with drafts of a model that is right about some of them."""
    return serve_llama(folder, drafts=drafts_of(folder, "almost_llama"))


def draft_states(folder: Path) -> Result:
    """Likewise, with drafts of a model that keeps states, so that groups hold layers of the draft model alone."""
    return serve_llama(folder, drafts=drafts_of(folder, "mamba2"), memory="8MiB")


def serve_headed(folder: Path, **options: Any) -> Result:
    """Likewise, a model with prediction heads that nothing runs."""
    return serve_llama(folder, "headed", **options)


def draft_headed(folder: Path) -> Result:
    """Likewise, with the drafts of the heads, some of which are right."""
    return serve_headed(folder, drafts="mtp")


def draft_of(engine: Engine) -> Result:
    """Return what an engine generates before and after its proposer knows the answers, and what the proposer saw."""
    ANSWERS.clear()
    plain = engine.generate(PROMPTS, GREEDY)
    ANSWERS[:] = [[*output.prompt_token_ids, *output.token_ids] for output in plain]
    drafted = engine.generate(PROMPTS, GREEDY)
    drafting: Any = scheduler_of(engine)._drafting
    return {
        "plain": tokens_of(plain),
        "drafted": tokens_of(drafted),
        "records": drafting._proposer.records,
        "counts": counts_of(engine),
    }


def draft_guessing(folder: Path) -> Result:
    """What heads draft that are never right, for requests that also get right drafts."""
    options: dict[str, Any] = {
        "plugins": [plugin("noting_plugin", proposers={"noting": Noting})],
        "drafts": "noting",
        "max_num_batched_tokens": 24,
    }
    with engine_of(folder / "guessing", **options) as engine:
        return draft_of(engine)


def draft_from_hidden_states(folder: Path) -> Result:
    """Drafts of a proposer that needs hidden states."""
    drafts = {"name": "reading", "model": str(folder / "llama")}
    options: dict[str, Any] = {"max_num_batched_tokens": 24}
    with engine_of(
        folder / "llama", plugins=[plugin("reading_plugin", proposers={"reading": Reading})], drafts=drafts, **options
    ) as engine:
        drafting: Any = scheduler_of(engine)._drafting
        return {**draft_of(engine), "missing": drafting._proposer.num_missing}


def serve_gemma(folder: Path, memory: int | None = None, **options: Any) -> Result:
    """Windows beside full attention; requests are preempted and recomputed."""
    memory = share_of(135168) if memory is None else memory
    with engine_of(folder / "gemma3_text", memory=memory, max_model_len=96, **options) as engine:
        tokens = tokens_of(engine.generate(PROMPTS, GREEDY))
        return {"tokens": tokens, "counts": counts_of(engine)}


def host_gemma(folder: Path) -> Result:
    """Likewise, with evicted blocks in host memory."""
    return serve_gemma(folder, host_memory="1MiB")


def draft_gemma(folder: Path, **options: Any) -> Result:
    """Preempted and recomputed, with the model as its own draft model."""
    return serve_gemma(folder, share_beside_draft(221184), drafts=drafts_of(folder, "gemma3_text"), **options)


def overlap_llama(folder: Path, overlap: str = "on") -> Result:
    """Steps that overlap, of requests that ask for more than their next tokens; the host waits once a step."""
    params = [
        SamplingParams(max_new_tokens=5 + 2 * index, temperature=index % 2, seed=index, **extras)
        for index, extras in enumerate(EXTRAS)
    ]
    with engine_of(folder / "llama", max_num_batched_tokens=24, overlap=overlap) as engine:
        # A step is computed when it is launched, and then reads tokens that the host does not know.
        outputs = engine.generate(PROMPTS, params)
        num_steps, num_waits = engine.stats().steps, 0
        if overlap == "on":
            queue = on_queue(engine)
            outputs += engine.generate(PROMPTS, params)
            num_waits = len(queue.queued_at_wait)
        return {
            "tokens": tokens_of(outputs),
            "likely": [round(value, 2) + 0.0 for output in outputs for value in output.logprobs or ()],
            "waits are steps": num_waits == engine.stats().steps - num_steps,
            "counts": counts_of(engine),
        }


def overlap_gemma(folder: Path, **options: Any) -> Result:
    """Windows beside full attention, steps that overlap, requests that are preempted and recomputed."""
    sizes: Result = {"max_model_len": 96, "max_num_batched_tokens": 24, "memory": share_of(110592), "overlap": "on"}
    with engine_of(folder / "gemma3_text", **{**sizes, **options}) as engine:
        params = SamplingParams(max_new_tokens=30, ignore_eos=True, repetition_penalty=1.1)
        return {"tokens": tokens_of(engine.generate(PROMPTS, params)), "counts": counts_of(engine)}


def overlap_host_gemma(folder: Path) -> Result:
    """Likewise, with evicted blocks in host memory."""
    return overlap_gemma(folder, host_memory="1MiB")


def overlap_any_calls(folder: Path, overlap: str = "on") -> Result:
    """Verbs at random, of an engine whose steps overlap."""
    ends: Result = {}
    memory, memories = share_of(110592), [share_of(110592), share_of(221184)]
    options: Result = {"max_model_len": 40, "max_num_seqs": 3, "max_num_batched_tokens": 16, "overlap": overlap}
    with engine_of(folder / "llama", memory=memory, **options) as engine:
        for seed in range(3):
            for output in call_at_random(engine, seed, lambda length: PROMPTS[7][:length], EXTRAS, (), memories, 40):
                ends[f"{seed} {output.request_id} {output.sample}"] = [output.finish_reason, *output.token_ids]
            assert 0 == held_pages(engine)
    return ends


def overlap_interrupt(folder: Path) -> Result:
    """Ctrl-C while rank 0 waits for its device, and steps after it."""
    with engine_of(folder / "llama", overlap="on") as engine:
        on_queue(engine, None).interrupted_step = 1
        for prompt in PROMPTS[:2]:
            engine.add_request(prompt, SamplingParams(max_new_tokens=3))
        tokens: dict[str, list[int]] = {}
        num_interrupts = 0
        while num_interrupts < 2:
            try:
                while engine.has_unfinished:
                    for output in engine.step():
                        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                break
            except KeyboardInterrupt:
                num_interrupts += 1
        return {"tokens": tokens, "interrupts": num_interrupts, "held": held_pages(engine)}


def serve_latents(folder: Path, family: str = "deepseek_v2") -> Result:
    """Latents, which each rank keeps for its own heads."""
    with engine_of(folder / family, max_num_batched_tokens=48) as engine:
        return {"tokens": tokens_of(engine.generate(PROMPTS, GREEDY)), "counts": counts_of(engine)}


def serve_chosen_latents(folder: Path) -> Result:
    """Latents, and an indexer that chooses which of them are read."""
    return serve_latents(folder, "deepseek_v32")


def serve_mixtral(folder: Path) -> Result:
    """Experts."""
    with engine_of(folder / "mixtral", max_num_batched_tokens=48) as engine:
        return {"tokens": tokens_of(engine.generate(PROMPTS, GREEDY)), "counts": counts_of(engine)}


def embed_bert(folder: Path, family: str = "bert") -> Result:
    """Layers that keep nothing."""
    with Embedder.from_pretrained(folder / family, stack=make_stack(), pooling="mean") as embedder:
        outputs = embedder.embed(PROMPTS[:4])
        assert all(output.embedding is not None for output in outputs)
        return {
            "groups": len(embedder.grouping.groups),
            "embeddings": [[round(value, 3) for value in output.embedding or ()] for output in outputs],
        }


def embed_eurobert(folder: Path) -> Result:
    """Likewise, with heads that are divided."""
    return embed_bert(folder, "eurobert")


def use_verbs(folder: Path) -> Result:
    """Abort, pin, reset and resize, between steps, some of which are graphs, and with requests that continue."""
    results: Result = {}
    options: Result = {"memory": share_of(110592), "max_num_batched_tokens": 16, "max_model_len": 96}
    with engine_of(folder / "llama", **options, graphs=[4, 8], graph_query_lens=[1]) as engine:
        graphs = runner_of(engine).graphs
        pin = engine.pin_prefix(PROMPTS[7])
        results["pinned"] = pin.num_tokens
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(prompt, GREEDY, str(number))
        ended: dict[str, list[int]] = {}

        def run(num_steps: int) -> None:
            for _ in range(num_steps):
                for output in engine.step():
                    if output.finish_reason is not None:
                        ended[output.request_id] = list(output.token_ids)

        run(3)
        engine.abort("3")
        run(2)
        engine.resize_cache(share_of(221184))
        results["graphs after a resize"] = graphs.num_graphs
        run(8)
        engine.reset_prefix_cache()
        run(1)
        engine.resize_cache(share_of(110592))
        engine.unpin(pin)
        while engine.has_unfinished:
            run(1)
        results["ended"] = {key: ended[key] for key in sorted(ended) if key != "3"}
        results["counts"] = counts_of(engine)
        results["replays"] = graphs.num_replays
        try:
            engine.resize_cache("1KiB")
        except KVFrameError as error:
            results["refused"] = type(error).__name__
    return results


CASES: Mapping[str, Callable[[Path], Result]] = {
    function.__name__: function
    for function in (
        serve_llama,
        draft_llama,
        draft_states,
        serve_headed,
        draft_headed,
        draft_guessing,
        draft_from_hidden_states,
        serve_gemma,
        host_gemma,
        overlap_llama,
        overlap_gemma,
        overlap_host_gemma,
        overlap_any_calls,
        overlap_interrupt,
        draft_gemma,
        serve_latents,
        serve_chosen_latents,
        serve_mixtral,
        embed_bert,
        embed_eurobert,
        use_verbs,
    )
}


@contextmanager
def followed(code: int = 0) -> Iterator[None]:
    """Go on after an engine that this rank has followed to its end: ``from_pretrained`` ends with that code."""
    try:
        yield
    except SystemExit as end:
        if end.code != code:
            raise


def asked(names: Iterable[str]) -> list[str]:
    """Return the names that the environment asks for."""
    return [name for name in names if name in os.environ[ASKED].split()]


def run_cases(folder: Path) -> Result:
    """Run the cases that are asked for, one engine after the other."""
    results = {}
    for name in asked(CASES):
        with followed():
            results[name] = CASES[name](folder)
    return results


def run_stores(folder: Path) -> Result:
    """Engines that find what engines before them gave to a disk, which both ranks share."""
    results: Result = {}
    _without_clocks()
    disk = {"path": str(folder / "pages"), "size": "64MiB"}
    for family in asked(STORED):
        for turn in ("stored", "found"):
            with followed(), engine_of(folder / family, disk=disk, host_memory="1MiB", audit=True) as engine:
                results[f"{family} {turn}"] = _served(engine, PROMPTS)
    return results


def run_bad_stores(folder: Path) -> Result:
    """Engines whose second rank has a store that forgets, fails or does not answer."""
    results: Result = {}
    _without_clocks()
    shelf = SHELVES.setdefault("one", Shelf())
    is_second = os.environ["RANK"] == "1"

    def serve(name: str) -> None:
        with followed(), engine_of(folder / "llama", stores=["shelf"], plugins=[shelf_plugin()]) as engine:
            results[name] = _served(engine, PROMPTS[3:4])

    serve("stored")
    records = dict(shelf.records)
    if is_second:  # the blocks were given in the order of the prompt
        shelf.records = dict([*records.items()][:8])
    serve("half")
    shelf.records = dict(records)
    shelf.failing = is_second
    serve("failing")
    shelf.failing = False
    tiers.LEAST_WAIT = 0.05
    if is_second:
        shelf.gate.clear()
        threading.Timer(2.0, shelf.gate.set).start()
    serve("late")
    shelf.gate.wait()
    _without_clocks()
    serve("again")
    return results


def _without_clocks() -> None:
    """Let no measured time decide what is fetched."""
    tiers.LEAST_WAIT, tiers.LEAST_TOKENS = 60.0, 1 << 60


def _served(engine: Engine, prompts: Sequence[Sequence[int]]) -> Result:
    outputs = engine.generate(prompts, GREEDY)
    assert engine.flush_page_stores()
    assert 0 == held_pages(engine) == fetcher_of(engine).num_waiting_bytes
    return {
        "tokens": tokens_of(outputs),
        "restored": [0 if output.cached is None else output.cached.restored_tokens for output in outputs],
        "waits": engine.stats().waits_in_vain,
    }


def run_refused(folder: Path) -> Result:
    """Set-ups that fail alike on both ranks; further engines can be made after them."""
    messages = {}
    with followed(71):
        try:
            engine_of(folder / "one_kv_head")
        except KVFrameError as error:
            messages["one_kv_head"] = str(error)
    try:
        Engine.from_pretrained(folder / "llama", stack=Stack.from_mapping({"model": {"device": "cpu:0"}}))
    except KVFrameError as error:
        messages["device"] = str(error)
    with followed(), engine_of(folder / "llama") as engine:
        try:
            engine.save_prefixes(folder / "prefixes", PROMPTS[:1])
        except KVFrameError as error:
            messages["prefixes"] = str(error)
    return messages


def run_different(folder: Path) -> Result:
    """Set-ups that differ between the ranks; then one that does not."""
    outcomes: Result = {}

    def serve(name: str, model: Path, code: int = 71) -> None:
        with followed(code):
            try:
                with engine_of(model) as engine:
                    outcomes[name] = engine.generate(PROMPTS[:1], GREEDY)[0].finish_reason
            except KVFrameError as error:
                outcomes[name] = f"{type(error).__name__}: {error}"

    rank = int(os.environ["RANK"])
    serve("weights", folder / ("llama", "other_llama")[rank])
    serve("whole weights", folder / ("bert", "other_bert")[rank])
    serve("config", folder / ("llama", "turned_llama")[rank])
    with tempfile.TemporaryDirectory() as packages:
        FakeSite(Path(packages)).add("kvframe-fake", "fake", version=("1.0", "2.0")[rank])
        sys.path.insert(0, packages)
        serve("packages", folder / "llama")
        sys.path.remove(packages)
    serve("nothing", folder / "llama", 0)
    return outcomes


def run_three(folder: Path) -> Result:
    """A model of 4 heads over three ranks."""
    with followed(71):
        try:
            engine_of(folder / "llama")
        except KVFrameError as error:
            return {"said": str(error)}
    return {}


# --- failures ---------------------------------------------------------------------------------------------------------


def serve_long(
    folder: Path, on_step: Callable[[Engine, int], None] = lambda engine, number: None, **options: Any
) -> Result:
    """Serve until something ends this process."""
    with engine_of(folder / "llama", **options) as engine:
        for number in range(10**6):
            if not engine.has_unfinished:
                for prompt in PROMPTS:
                    engine.add_request(prompt, GREEDY)
            on_step(engine, number)
            engine.step()
    return {}


def when_following(rank: int, act: Callable[[], None]) -> None:
    """Call ``act`` in a rank after its set-up, before it computes what rank 0 tells it."""
    if int(os.environ["RANK"]) == rank:
        follow = Follower.follow

        def act_first(self: Follower, *arguments: Any, **options: Any) -> None:
            act()
            follow(self, *arguments, **options)

        Follower.follow = act_first  # type: ignore[method-assign]


def kill_1(folder: Path) -> Result:
    """Kill rank 1 while both serve."""
    when_following(1, lambda: threading.Timer(0.3, _die).start())
    return serve_long(folder)


def kill_1_drafting(folder: Path) -> Result:
    """Likewise, with drafts of a model that rank 0 alone runs."""
    when_following(1, lambda: threading.Timer(0.3, _die).start())
    return serve_long(folder, drafts=drafts_of(folder, "almost_llama"))


def serve_in_thread(folder: Path) -> Result:
    """Serve in a thread until something ends this process, as a server does, while the main thread waits."""
    with engine_of(folder / "llama") as engine:

        def serve() -> None:
            while True:
                for prompt in PROMPTS:
                    engine.add_request(prompt, GREEDY)
                while engine.has_unfinished:
                    engine.step()

        threading.Thread(target=serve, daemon=True).start()
        threading.Event().wait(60)
    return {}


def kill_1_beside_a_thread(folder: Path) -> Result:
    """Kill rank 1 while a thread of rank 0 serves."""
    when_following(1, lambda: threading.Timer(0.3, _die).start())
    return serve_in_thread(folder)


def raise_on_1_beside_a_thread(folder: Path) -> Result:
    """Let the attention of rank 1 raise while a thread of rank 0 waits for it in a step."""
    when_following(1, _break_attention)
    return serve_in_thread(folder)


def kill_1_idle(folder: Path) -> Result:
    """Kill rank 1 while rank 0 waits for requests."""
    when_following(1, lambda: threading.Timer(0.3, _die).start())
    with engine_of(folder / "llama"):
        threading.Event().wait(60)
    return {}


def stop_1(folder: Path) -> Result:
    """Stop rank 1 while both serve, so that it sends no beats, and let it go on after rank 0 has ended."""
    links.BEAT_SECONDS = 0.1

    def stop() -> None:
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    when_following(1, lambda: threading.Timer(0.3, stop).start())
    return serve_long(folder)


def kill_0(folder: Path) -> Result:
    """Kill rank 0 between two steps."""
    return serve_long(folder, lambda engine, number: _die() if number == 5 else None)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_on_1(folder: Path) -> Result:
    """Let the attention of rank 1 raise in the middle of a step, while rank 0 waits for it."""
    when_following(1, _break_attention)
    return serve_long(folder)


def raise_in_set_up(folder: Path) -> Result:
    """Let rank 1 alone fail in its set-up, while rank 0 waits for it."""
    if os.environ["RANK"] == "1":
        _break_attention()
    engine_of(folder / "llama", self_check=True)
    return {}


def _break_attention() -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("attention is broken")

    _replace_attention(fail)


def _replace_attention(computed: Callable[..., Any]) -> None:
    from kvframe.attention.layer import AttentionLayer

    AttentionLayer.__call__ = computed  # type: ignore[method-assign]


def hang_on_1(folder: Path) -> Result:
    """Let the attention of rank 1 never end, while rank 0 waits for it and both answer."""
    lock = threading.Lock()
    lock.acquire()
    when_following(1, lambda: _replace_attention(lambda *arguments: lock.acquire(timeout=80)))
    return serve_long(folder, max_step_seconds=2)


def interrupt(folder: Path) -> Result:
    """Raise in rank 0 between two calls of the engine, and leave it."""

    def stop(engine: Engine, number: int) -> None:
        if number == 5:
            raise KeyboardInterrupt

    try:
        return serve_long(folder, stop)
    except KeyboardInterrupt:
        return {"left": True}


def kill_1_overlapping(folder: Path) -> Result:
    """Kill rank 1 while both serve with steps that overlap."""
    when_following(1, lambda: threading.Timer(0.3, _die).start())
    return serve_long(folder, overlap="on")


def raise_on_1_overlapping(folder: Path) -> Result:
    """Let the attention of rank 1 raise while rank 0 waits for its own device."""
    when_following(1, _break_attention)
    return serve_long(folder, overlap="on")


def fail_on_rank_0_overlapping(folder: Path) -> Result:
    """As ``fail_on_rank_0``, with steps that overlap."""
    return fail_on_rank_0(folder, overlap="on")


def fail_on_rank_0(folder: Path, **options: Any) -> Result:
    """Let rank 0 fail in a step of two requests out of many, in a thread, and ask its engine for more."""
    results: Result = {}

    def said_by(ask: Callable[[], Any]) -> list[str]:
        try:
            ask()
        except EngineError as error:
            return [error.code, str(error)]
        return []

    def serve(engine: Engine) -> None:
        stream = engine.stream(PROMPTS[0], GREEDY)
        for prompt in PROMPTS[1:]:
            engine.add_request(prompt, GREEDY)
        for _ in range(3):
            engine.step()
        requests = list(requests_of(engine).values())
        _break_attention()
        try:
            for _ in range(2):  # the tokens of a step that was computed before come first
                engine.step()
        except RuntimeError as error:
            results["raised"] = str(error)
        results["errors"] = [request.error for request in requests]
        results["reasons"] = sorted({str(request.finish_reason) for request in requests})
        results["step"], results["stream"] = said_by(engine.step), said_by(lambda: next(stream))
        results["generate"] = said_by(lambda: engine.generate(PROMPTS[:1]))
        counts = engine.stats()
        results["state"] = {
            "closed": engine.is_closed,
            "unfinished": engine.has_unfinished,
            "running": counts.num_running,
            "waiting": counts.num_waiting,
        }
        results["held"] = held_pages(engine)

    with engine_of(folder / "llama", max_num_seqs=2, **options) as engine:
        thread = threading.Thread(target=serve, args=(engine,))
        thread.start()
        thread.join(60)
    return results


RUNS: Mapping[str, Callable[[Path], Result]] = {
    function.__name__: function
    for function in (
        run_cases,
        run_stores,
        run_bad_stores,
        run_refused,
        run_different,
        run_three,
        kill_0,
        kill_1,
        kill_1_drafting,
        kill_1_overlapping,
        kill_1_idle,
        kill_1_beside_a_thread,
        stop_1,
        raise_on_1,
        raise_on_1_beside_a_thread,
        raise_in_set_up,
        hang_on_1,
        fail_on_rank_0,
        fail_on_rank_0_overlapping,
        raise_on_1_overlapping,
        interrupt,
    )
}


# --- processes -------------------------------------------------------------------------------------------------------


def run_ranks(run: Callable[[Path], Result], folder: Path) -> Result:
    """Run a function in two ranks, or as many as its name says; return rank 0's result, the exit codes and stderr."""
    size = 3 if run is run_three else 2
    port = free_port()
    with tempfile.TemporaryDirectory() as scratch:
        out, logs = Path(scratch, "out"), [Path(scratch, f"said{rank}") for rank in range(size)]
        children = [_fork(rank, size, port, run, folder, out, logs[rank]) for rank in range(size)]
        codes = {}
        for _ in children:
            child, status = os.wait()
            codes[children.index(child)] = os.waitstatus_to_exitcode(status)
            # A rank that stays longer than this after the other has ended is killed, which its exit code shows.
            left = [child for number, child in enumerate(children) if number not in codes]
            signal.signal(signal.SIGALRM, partial(_kill, left))
            signal.alarm(MOST_SECONDS if left else 0)
        return {
            "result": json.loads(out.read_text()) if out.exists() else None,
            "codes": [codes[rank] for rank in range(size)],
            "said": [log.read_text(errors="replace") for log in logs],
        }


def _kill(processes: Sequence[int], *_: Any) -> None:
    for process in processes:
        os.kill(process, signal.SIGQUIT)


def _fork(rank: int, size: int, port: int, run: Callable[[Path], Result], folder: Path, out: Path, log: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with log.open("w") as errors:
            os.dup2(errors.fileno(), 2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(90)  # a deadlock ends here, and the test says so
        result = run(folder)
        if rank == 0:
            out.write_text(json.dumps(result))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = sys.argv[2:] or list(RUNS)
    if "RANK" in os.environ:  # a process of torchrun
        RUNS[names[0]](Path(sys.argv[1]))
        sys.exit()
    print(json.dumps({name: run_ranks(RUNS[name], Path(sys.argv[1])) for name in names}))
