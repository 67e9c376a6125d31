"""Engines publish their caches' events over real sockets, and a router's index says what each then finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvframe_engine.engine import Engine
from kvframe_engine.requests.request import SamplingParams
from kvframe_zmq import Subscriber

from kvframe.cache import events as events_module
from kvframe.contract.errors import StackError
from kvframe.routing import PrefixIndex
from tests.cache.mirror import Mirror
from tests.engine.scripted_model import ScriptedModel
from tests.engine.test_embedding import Echo
from tests.support.waiting import eventually

PROMPT = "the quick brown fox jumps"
SHORT = SamplingParams(max_new_tokens=3)
KEY = "ab" * 32


def engine_at(address: str, **options: Any) -> Engine:
    return ScriptedModel(PROMPT).engine(cache_key=KEY, events=address, **options)


def hits(subscriber: Subscriber, prompt: str) -> dict[str, int]:
    return subscriber.index.hits([*prompt.encode()], salt="anna")


def test_two_engines_report_what_their_router_said(tmp_path: Path) -> None:
    addresses = {name: f"ipc://{tmp_path}/{name}" for name in ("one", "two")}
    subscriber = Subscriber(PrefixIndex(bytes.fromhex(KEY)), addresses, interval=0.05)
    subscriber.start()
    heard = Mirror()
    prompts = [PROMPT, PROMPT[:17], "another one than that", PROMPT + " over", "another one too"]
    with engine_at(addresses["one"], host_memory="8KiB") as one, engine_at(addresses["two"]) as two:
        one.on_cache_events = heard.replay
        engines = {"one": one, "two": two}
        eventually(lambda: hits(subscriber, PROMPT) == {"one": 0, "two": 0})
        for number in range(12):
            prompt, name = prompts[number % len(prompts)], "one" if number % 3 else "two"
            (output,) = engines[name].generate([prompt], SHORT, cache_salt="anna")
            assert output.cached is not None
            eventually(lambda p=prompt, n=name: hits(subscriber, p)[n] == (len(p) - 1) // 4 * 4)  # type: ignore[misc]
            said = hits(subscriber, prompt)
            for each, engine in engines.items():
                (again,) = engine.generate([prompt], SHORT, cache_salt="anna")
                assert again.cached is not None
                assert said[each] == again.cached.num_tokens
        assert heard.blocks
        one.reset_prefix_cache()
        eventually(lambda: hits(subscriber, PROMPT)["one"] == 0)
    # An engine that ended is known until it is removed.
    assert hits(subscriber, PROMPT)["two"] > 0
    subscriber.close()


def test_an_embedder_publishes_too(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/events"
    subscriber = Subscriber(PrefixIndex(bytes.fromhex(KEY)), {"one": address}, interval=0.05)
    subscriber.start()
    with Echo("full_attention").embedder(events=address, key=KEY) as embedder:
        embedder.embed([[*range(12), 50]])
        eventually(lambda: subscriber.index.hits([*range(12), 50]) == {"one": 12})
    subscriber.close()


def test_an_engine_whose_publisher_cannot_be_opened_serves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_at(f"ipc://{tmp_path}/nowhere/events") as engine:
        (output,) = engine.generate([PROMPT], SHORT)
        eventually(lambda: "event publisher 'zmq' cannot be opened now" in caplog.text)
    with ScriptedModel(PROMPT).engine() as without:
        assert [output.token_ids] == [each.token_ids for each in without.generate([PROMPT], SHORT)]


def test_a_publisher_with_wrong_options_is_refused() -> None:
    with pytest.raises(StackError, match=r"cache\.events: event publisher 'zmq': endpoint must be like"):
        engine_at("smoke://signals")


def test_without_prefix_caching_nothing_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("nobody listens")

    monkeypatch.setattr(events_module, "blake2b", never)
    with engine_at(f"ipc://{tmp_path}/events", prefix_caching=False) as engine:
        engine.generate([PROMPT], SHORT)
    assert not (tmp_path / "events").exists()
