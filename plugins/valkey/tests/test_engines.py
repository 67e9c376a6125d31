"""Engines that share a server: one computes a prompt, another one reads it; faults of the server change no token."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvframe import Engine
from tests.models.serving import GREEDY, TinyModel, ids
from tests.support.store_server import StoreServer

SYSTEM = ids(3, 37)
PROMPTS = [[*SYSTEM, *ids(6, 3)], [*SYSTEM, *ids(7, 19)]]
FAMILIES = ["llama", "gemma3_text", "mamba2", "qwen3_next", "deepseek_v3"]
"""Full attention; windows and full attention; states; gated delta rules and full attention; latents."""
KEY = "5" * 64


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.save(tmp_path_factory.mktemp("llama"), "llama")


def start_engine(model: TinyModel, server: StoreServer, *, key: str = KEY) -> Engine:
    store = {"name": "valkey", "url": server.url, "timeout": 30}
    return model.engine(block_size=4, stores=[store], key=key)


def restored(engine: Engine, expected: Sequence[tuple[int, ...]]) -> list[int]:
    """Return how many tokens of each prompt come from the server; the generated tokens must be the expected ones."""
    outputs = engine.generate(PROMPTS, GREEDY)
    assert expected == [output.token_ids for output in outputs]
    return [output.cached.restored_tokens for output in outputs if output.cached is not None]


def compute(model: TinyModel, server: StoreServer) -> list[tuple[int, ...]]:
    """Let an engine compute the prompts and store them; return what it generates."""
    with start_engine(model, server) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
        assert engine.flush_page_stores()
        return [output.token_ids for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_engine_computes_prompts_and_another_generates(family: str, server: StoreServer, tmp_path: Path) -> None:
    model = TinyModel.save(tmp_path, family)
    expected = compute(model, server)
    with start_engine(model, server) as engine:
        assert min(restored(engine, expected)) > 0
        assert 0 == engine.stats().stores["valkey"].failures


def test_an_engine_with_another_key_finds_nothing(llama: TinyModel, server: StoreServer) -> None:
    expected = compute(llama, server)
    with start_engine(llama, server, key="6" * 64) as engine:
        assert [0, 0] == restored(engine, expected)


def test_records_that_another_client_replaced_are_refused_and_stored_again(
    llama: TinyModel, server: StoreServer
) -> None:
    expected = compute(llama, server)
    with server.client() as client:
        keys = client.keys()
        for index, key in enumerate(keys):
            value = client.get(key)
            other = client.get(keys[index - 1])
            changes = [os.urandom(len(value)), other, value[:-1], value[:-1] + bytes([value[-1] ^ 1]), b""]
            client.set(key, changes[index % len(changes)])
    with start_engine(llama, server) as engine:
        assert [0, 0] == restored(engine, expected)
        assert engine.flush_page_stores()
    for _ in range(3):
        with start_engine(llama, server) as engine:
            num_restored = restored(engine, expected)
            assert engine.flush_page_stores()
    assert min(num_restored) > 0


@pytest.mark.parametrize("fault", ["stop", "pause"])
def test_a_server_that_fails_while_engines_run_costs_hits_only(
    fault: str, llama: TinyModel, own_server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvframe_stores.sealed_store.FIRST_REST", 0.0)
    expected = compute(llama, own_server)
    store: dict[str, Any] = {"name": "valkey", "url": own_server.url, "timeout": 0.5}
    with llama.engine(block_size=4, stores=[store], key=KEY) as engine:
        assert min(restored(engine, expected)) > 0
        engine.reset_prefix_cache()
        getattr(own_server, fault)()
        assert [0, 0] == restored(engine, expected)
        engine.flush_page_stores()
        assert engine.stats().stores["valkey"].failures > 0
        if fault == "stop":
            own_server.start()
        else:
            own_server.resume()
        for _ in range(20):
            engine.reset_prefix_cache()
            num_restored = restored(engine, expected)
            engine.flush_page_stores()
            if min(num_restored) > 0:
                break
        assert min(num_restored) > 0


def test_the_server_sees_neither_tokens_nor_the_key(llama: TinyModel, server: StoreServer) -> None:
    compute(llama, server)
    with server.client() as client:
        keys = client.keys()
        content = b"".join(keys + client.mget(keys))
    assert len(content) > 10_000
    assert bytes.fromhex(KEY) not in content
    assert KEY.encode() not in content
    for dtype in ("u1", "<i2", "<i4", "<i8"):
        assert np.array(SYSTEM[:8], dtype).tobytes() not in content
