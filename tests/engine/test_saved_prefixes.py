"""Prefixes saved by one engine and loaded into another: requests hit them, and get the same tokens."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from kvframe_engine.contract.errors import PrefixFileError
from kvframe_engine.requests.prompt import AnyPrompt
from kvframe_testing.audit import audit, findable_pages
from kvframe_transformers.testing import save_tiny

from kvframe import Engine, InputSequence, Prompt, Stack, content_key, prefix_key
from kvframe.contract.errors import ModelError, RequestError
from tests.cache.mirror import Mirror
from tests.engine.scripted_model import ScriptedModel
from tests.models.serving import GREEDY, TinyModel, held_pages, ids
from tests.support.engines import manager_of

SYSTEM = ids(3, 37)
ASKED = [[*SYSTEM, *ids(6, 3)], [*SYSTEM, *ids(7, 19)]]
FAMILIES = ["llama", "gemma3_text", "mamba2", "qwen3_next", "deepseek_v3"]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, models: Callable[[str], TinyModel]) -> TinyModel:
    """Full attention; windows and full attention; states; gated delta rules and full attention; latents."""
    return models(request.param)


def tokens(engine: Engine, prompts: Sequence[AnyPrompt], **options: Any) -> list[tuple[int, ...]]:
    outputs = engine.generate(prompts, GREEDY, **options)
    assert {"length"} == {output.finish_reason for output in outputs}
    return [output.token_ids for output in outputs]


def found(engine: Engine) -> int:
    return engine.stats().cached_prompt_tokens


def test_tokens_behind_a_loaded_prefix_are_those_of_an_engine_that_computed_it(tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "prefixes"
    with tiny.engine(block_size=4) as engine:
        expected = tokens(engine, ASKED)
        (saved,) = engine.save_prefixes(path, [SYSTEM])
        kept = len(SYSTEM) // engine.plan.alignment * engine.plan.alignment
        assert (kept, SYSTEM[:kept]) == (saved.num_tokens, list(saved.token_ids))
        assert 0 == held_pages(engine)
    with tiny.engine(block_size=4) as engine:
        (loaded,) = engine.load_prefixes(path)
        assert saved == loaded
        assert 0 == held_pages(engine)
        audit(manager_of(engine))
        assert (0, 0) == (engine.stats().computed_tokens, found(engine))
        assert expected == tokens(engine, ASKED)
        assert 2 * kept == found(engine)


@pytest.mark.parametrize(
    ("cache", "model"),
    [({"format": "int8_token_head"}, {}), ({}, {"dtype": "bfloat16"}), ({"hybrid": False, "dtype": "bfloat16"}, {})],
    ids=str,
)
def test_pages_are_bytes_whatever_they_hold(cache: dict[str, Any], model: dict[str, Any], tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "gemma3_text")
    tables = {
        "cache": {"block_size": 4, "memory": "1MiB", **cache},
        "model": model,
        "engine": {"self_check": False},
    }
    stack = Stack.from_mapping(tables)
    runs = []
    for _ in range(2):
        with Engine.from_pretrained(tmp_path / "model", stack=stack) as served:
            if runs:
                served.load_prefixes(tmp_path / "prefixes")
            runs.append((tokens(served, ASKED[:1]), found(served)))
            served.save_prefixes(tmp_path / "prefixes", [SYSTEM])
    assert [(runs[0][0], 0), (runs[0][0], 36)] == runs


@pytest.fixture(scope="module")
def whisper(models: Callable[[str], TinyModel]) -> TinyModel:
    return models("whisper")


KEY = "5f" * 32
LOG_MEL = np.sin(np.arange(80 * 100)).reshape(80, 100)


def heard(log_mel: Any, *decoder: int) -> Prompt:
    return Prompt(encoder=log_mel, decoder=decoder)


def test_what_an_encoder_made_of_its_input_is_saved_too(whisper: TinyModel, tmp_path: Path) -> None:
    asked = [heard(LOG_MEL, 3, 5, 7, 9, 11, language) for language in (5, 6)]
    with whisper.engine(block_size=4, key=KEY) as engine:
        expected = tokens(engine, asked)
        # The second prompt has no whole block of tokens: only its encoder's input is saved.
        saved = engine.save_prefixes(tmp_path / "prefixes", [asked[0], heard(LOG_MEL + 1, 3)])
        assert [4, 0] == [each.num_tokens for each in saved]
    with whisper.engine(block_size=4, key=KEY) as engine:
        assert saved == engine.load_prefixes(tmp_path / "prefixes")
        assert expected == tokens(engine, asked)
        engine.generate([heard(LOG_MEL + 1, 3, 4)], GREEDY)
        assert (8, 0) == (found(engine), engine.stats().computed_input_tokens)


NAMES_OF_INPUTS = """
import hashlib, json, sys
path, secret, content = sys.argv[1], bytes.fromhex(sys.argv[2]), sys.stdin.buffer.read()
file = open(path, "rb").read()
length = int.from_bytes(file[:8], "little")
header = json.loads(file[8 : 8 + length])
start, stop = header["prefixes"]["data_offsets"]
prefixes = json.loads(file[8 + length + start : 8 + length + stop])
plain = hashlib.sha256(b"float32 (80, 100)\\n" + content).digest()
keyed = hashlib.blake2b(plain, digest_size=32, key=secret, person=b"kvframe.content1").hexdigest()
print([each["inputs"]["encoder"]["key"] == keyed for each in prefixes], plain in file, plain.hex().encode() in file)
"""


def test_an_input_is_in_a_file_by_a_key_that_other_processes_make_from_the_secret(
    whisper: TinyModel, tmp_path: Path
) -> None:
    path, mirror = tmp_path / "prefixes", Mirror()
    with whisper.engine(block_size=4, key=KEY) as engine:
        engine.on_cache_events = mirror.replay
        engine.save_prefixes(path, [heard(LOG_MEL, 3, 5, 7, 9), heard(LOG_MEL + 1, 3)])
    content = LOG_MEL.astype("<f4").tobytes()
    for secret, expected in ((KEY, "[True, False] False False"), ("5e" * 32, "[False, False] False False")):
        command = [sys.executable, "-I", "-c", NAMES_OF_INPUTS, str(path), secret]
        done = subprocess.run(command, input=content, capture_output=True, check=True)
        assert expected == done.stdout.decode().strip()
    # The keys of events are equal too: of the prefix, and of the input.
    secret, plain = bytes.fromhex(KEY), sha256(b"float32 (80, 100)\n" + content).digest()
    inputs = {"encoder": InputSequence(50, content_key(secret, plain))}
    told = {key for _, key in mirror.blocks}
    assert prefix_key(secret, [3, 5, 7, 9], inputs=inputs) in told
    assert prefix_key(secret, [3, 5, 7, 9]) not in told


def test_a_prefix_with_an_input_is_not_saved_without_a_key(whisper: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "prefixes").write_bytes(b"before")
    with whisper.engine(block_size=4) as engine:
        with pytest.raises(PrefixFileError, match=r"cannot hold prompts with an input .*; set key") as refused:
            engine.save_prefixes(tmp_path / "prefixes", [heard(LOG_MEL, 3, 5, 7, 9)])
        assert "no_key" == refused.value.code
        assert (0, []) == (engine.stats().computed_tokens, list(findable_pages(manager_of(engine))))
    assert ["prefixes"] == [each.name for each in tmp_path.iterdir()]
    assert b"before" == (tmp_path / "prefixes").read_bytes()


def test_a_file_with_inputs_is_refused_where_they_would_not_be_found(whisper: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "prefixes"
    with whisper.engine(block_size=4, key=KEY) as engine:
        engine.save_prefixes(path, [heard(LOG_MEL, 3, 5, 7, 9)])
    for key, code, says in (
        ("5e" * 32, "other_key", r"by keys of another secret; set key in the stack's \[cache\]"),
        (None, "no_key", r"this stack has no secret for them; set key in its \[cache\], 64 hexadecimal digits or"),
    ):
        with whisper.engine(block_size=4, key=key) as engine:
            with pytest.raises(PrefixFileError, match=says) as refused:
                engine.load_prefixes(path)
            assert code == refused.value.code
            assert [] == list(findable_pages(manager_of(engine)))
            audit(manager_of(engine))


def test_without_inputs_a_file_needs_no_key(llama: TinyModel, tmp_path: Path) -> None:
    with llama.engine(block_size=4, key=KEY) as engine:
        engine.save_prefixes(tmp_path / "prefixes", [SYSTEM])
    for key in (None, "5e" * 32):
        with llama.engine(block_size=4, key=key) as engine:
            assert [True] == [each.is_cached for each in engine.load_prefixes(tmp_path / "prefixes")]


def test_a_prefix_is_loaded_under_its_salt_or_the_one_that_is_given(llama: TinyModel, tmp_path: Path) -> None:
    with llama.engine(block_size=4) as engine:
        engine.save_prefixes(tmp_path / "prefixes", [SYSTEM], cache_salt="tenant")
    for salt, name in ((None, "tenant"), ("other", "other"), ("", "")):
        with llama.engine(block_size=4) as engine:
            (loaded,) = engine.load_prefixes(tmp_path / "prefixes", cache_salt=salt)
            assert name == loaded.cache_salt
            for asked in ("tenant", "other", ""):
                before = found(engine)
                tokens(engine, ASKED[:1], cache_salt=asked)
                assert (36 if asked == name else 0) == found(engine) - before


def test_listeners_are_told_of_what_is_loaded(tiny: TinyModel, tmp_path: Path) -> None:
    mirrors = [Mirror(), Mirror()]
    with tiny.engine(block_size=4) as engine:
        engine.save_prefixes(tmp_path / "prefixes", [SYSTEM])
    for mirror, is_early in zip(mirrors, (True, False), strict=True):
        with tiny.engine(block_size=4, key="ab" * 32) as engine:
            if is_early:
                engine.on_cache_events = mirror.replay
            engine.load_prefixes(tmp_path / "prefixes")
            if not is_early:
                engine.on_cache_events = mirror.replay
            assert len(mirror.blocks) == len(list(findable_pages(manager_of(engine)))) > 0
    assert mirrors[0].blocks.keys() == mirrors[1].blocks.keys()


def test_equal_pages_are_in_a_file_and_in_the_cache_once(llama: TinyModel, tmp_path: Path) -> None:
    with llama.engine(block_size=4) as engine:
        engine.save_prefixes(tmp_path / "one", [ASKED[0]])
        engine.save_prefixes(tmp_path / "two", [ASKED[0], [*SYSTEM[:36], *ids(9, 4)]])
        sizes = [(tmp_path / name).stat().st_size for name in ("one", "two")]
        assert engine.plan.groups[0].page_bytes < sizes[1] - sizes[0] < 2 * engine.plan.groups[0].page_bytes
    with llama.engine(block_size=4) as engine:
        assert all(each.is_cached for each in engine.load_prefixes(tmp_path / "two"))
        assert 10 + 1 == len(set(findable_pages(manager_of(engine))))
        engine.load_prefixes(tmp_path / "two")
        assert 10 + 1 == len(set(findable_pages(manager_of(engine))))


def test_other_libraries_read_the_file(llama: TinyModel, tmp_path: Path) -> None:
    with llama.engine(block_size=4) as engine:
        engine.save_prefixes(tmp_path / "prefixes", [SYSTEM, ids(5, 8)])
        page_bytes = engine.plan.groups[0].page_bytes
    with safetensors.safe_open(tmp_path / "prefixes", framework="np") as file:
        shapes = {name: file.get_tensor(name).shape for name in file.keys()}  # noqa: SIM118
        assert "kvframe.prefixes" == file.metadata()["format"]
        assert [*SYSTEM[:36], *ids(5, 8)] == file.get_tensor("tokens").tolist()
    assert ((11 * page_bytes,), (11,), (44,)) == (shapes["pages"], shapes["offsets"], shapes["tokens"])


def test_of_prefixes_that_do_not_fit_the_first_are_loaded(llama: TinyModel, tmp_path: Path) -> None:
    prompts = [ids(number, 32) for number in range(40, 60)]
    with llama.engine(block_size=4) as engine:
        engine.save_prefixes(tmp_path / "prefixes", [*prompts, ids(7, 100)])
    memory = llama.tight_memory(64, block_size=4, max_model_len=64)
    with llama.engine(block_size=4, memory=memory, max_model_len=64) as engine:
        room = engine.plan.num_slabs * engine.plan.groups[0].pages_per_slab // 8
        assert 1 <= room < 20
        loaded = engine.load_prefixes(tmp_path / "prefixes")
        assert [*[True] * room, *[False] * (21 - room)] == [each.is_cached for each in loaded]
        assert loaded[19].reason is not None
        assert "too few free blocks" in loaded[19].reason
        assert loaded[20].reason is not None
        assert "longer than a request can be here (64 tokens)" in loaded[20].reason
        assert 0 == held_pages(engine)
        audit(manager_of(engine))
        # The first prefix is evicted last: it is hit while a request takes the others' pages.
        tokens(engine, [ids(90, 20)])
        assert prompts[0][:28] == prompts[0][: manager_of(engine).find(prompts[0])]


def test_loaded_prefixes_stay_where_they_are_pinned(llama: TinyModel, tmp_path: Path) -> None:
    with llama.engine(block_size=4) as engine:
        engine.save_prefixes(tmp_path / "prefixes", [SYSTEM])
    with llama.engine(block_size=4) as engine:
        (loaded,) = engine.load_prefixes(tmp_path / "prefixes")
        assert 36 == engine.pin_prefix(loaded.token_ids).num_tokens
        # All but the last block, which is computed again because the last token always is.
        assert (32, 4) == (found(engine), engine.stats().computed_tokens)


def test_prefixes_are_loaded_and_saved_while_requests_run(llama: TinyModel, tmp_path: Path) -> None:
    with llama.engine(block_size=4) as engine:
        expected = tokens(engine, ASKED)
    with llama.engine(block_size=4, max_num_seqs=2) as engine:
        first = engine.add_request(ASKED[0], GREEDY)
        engine.step()
        engine.save_prefixes(tmp_path / "prefixes", [SYSTEM])
        engine.load_prefixes(tmp_path / "prefixes")
        second = engine.add_request(ASKED[1], GREEDY)
        engine.step()
        with pytest.raises(RequestError, match="max_num_seqs requests are running") as refused:
            engine.load_prefixes(tmp_path / "prefixes")
        assert "busy" == refused.value.code
        made: dict[str, list[int]] = {first: [], second: []}
        while engine.has_unfinished:
            for output in engine.step():
                made[output.request_id] = list(output.token_ids)
        assert [list(each) for each in expected] == [made[first], made[second]]


def test_a_file_that_cannot_be_written_leaves_what_was_there(llama: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "prefixes"
    with llama.engine(block_size=4) as engine:
        engine.save_prefixes(path, [SYSTEM])
        before = path.read_bytes()
        for prompts, error in (([SYSTEM, [1, 2]], RequestError), ([SYSTEM, [999]], RequestError)):
            with pytest.raises(error):
                engine.save_prefixes(path, prompts)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
        try:
            with pytest.raises(PrefixFileError, match=r"prefixes cannot be written: .*large") as refused:
                engine.save_prefixes(path, [ids(9, 40)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert ("unwritable", before, [path]) == (refused.value.code, path.read_bytes(), list(tmp_path.iterdir()))
        with pytest.raises(PrefixFileError, match="cannot be written: there is no folder"):
            engine.save_prefixes(tmp_path / "nowhere" / "prefixes", [SYSTEM])
        with pytest.raises(PrefixFileError, match="cannot be written: it is a folder"):
            engine.save_prefixes(tmp_path, [SYSTEM])
        assert 0 == held_pages(engine)


def test_a_model_that_nothing_tells_from_others_is_not_saved(tmp_path: Path) -> None:
    with (
        ScriptedModel("x" * 40).engine() as engine,
        pytest.raises(ModelError, match=r"^scripted cannot be identified"),
    ):
        engine.save_prefixes(tmp_path / "prefixes", ["a system prompt"])
    assert [] == list(tmp_path.iterdir())
