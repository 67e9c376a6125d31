"""Engines behind Ray Serve answer as one engine does, find what they cached, and lose no request with a replica."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvframe_serve.runner import EngineRequest

from kvframe import Engine, SamplingParams, Stack
from kvframe.contract import StackError
from plugins.ray.tests.conftest import STACK
from tests.support.waiting import eventually

NUM_REPLICAS = 2


def post(url: str, path: str = "/v1/completions", **body: Any) -> Any:
    request = urllib.request.Request(
        f"{url}{path}", data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        text = answer.read().decode()
    return text if body.get("stream") else json.loads(text)


def read_stream(url: str, begun: threading.Semaphore, **body: Any) -> str:
    """Return the events of an answer; ``begun`` is released when the first one has come."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        first = answer.readline()
        begun.release()
        try:
            rest = answer.read()
        except http.client.IncompleteRead as error:  # the frontend was lost
            rest = error.partial
        return str((first + rest).decode())


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def replicas_of(deployment: str) -> set[str]:
    """Return the names of the actors of a deployment."""
    import ray

    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if f"#{deployment}#" in actor["name"]}


def deploy(**arguments: Any) -> None:
    """Deploy the application, or update it."""
    from kvframe_ray import app
    from ray import serve

    # As `serve run` gives arguments: texts, in a dictionary.
    serve.run(app({"replicas": str(NUM_REPLICAS), "cpus": "0", **arguments}), name="tiny")


def kill(replica: str) -> None:
    import ray

    ray.kill(ray.get_actor(replica, namespace="serve"))


def expected(checkpoint: Path, prompt: str, max_new_tokens: int) -> str:
    with Engine.from_pretrained(checkpoint, stack=stack()) as engine:
        return str(engine.generate([prompt], SamplingParams(max_new_tokens=max_new_tokens))[0].text)


def stack() -> Stack:
    import tomllib

    return Stack.from_mapping(tomllib.loads(STACK))


def text_of(events: str) -> str:
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk.get("choices", ()))


def answers_are_those_of_an_engine(served: str, checkpoint: Path) -> None:
    text = expected(checkpoint, "once upon a time", 12)
    assert text == post(served, prompt="once upon a time", max_tokens=12)["choices"][0]["text"]
    assert text == text_of(post(served, prompt="once upon a time", max_tokens=12, stream=True))
    assert {"status": "ok"} == json.load(urllib.request.urlopen(f"{served}/health", timeout=20))
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(served, prompt="x" * 5000, max_tokens=1)
    assert (400, "prompt_too_long") == (caught.value.code, json.load(caught.value)["error"]["code"])


def a_prompt_of_megabytes_reaches_an_engine() -> None:
    from kvframe_ray.messages import DIRECTLY, Asked
    from ray import serve

    handle = serve.get_deployment_handle("Engine", "tiny").options(stream=True, method_name="generate", **DIRECTLY)
    long = EngineRequest(prompt=[60_000] * 2_000_000, params=SamplingParams(max_new_tokens=1), options={})
    (refusal,) = handle.remote(Asked(id="long", request=long))
    assert "prompt_too_long" == refusal.code


def each_conversation_finds_its_prefix(served: str) -> None:
    prompts = [f"conversation {index}: " + chr(97 + index) * 60 for index in range(8)]
    first = [post(served, prompt=prompt, max_tokens=1) for prompt in prompts]
    threading.Event().wait(1.0)  # The events of the last step may be under way.
    again = [cached(post(served, prompt=f"{prompt} and on", max_tokens=1)) for prompt in prompts]
    # 75 tokens: four blocks of 16. "conversation " is shared by all, which is less than a block.
    assert [64] * 8 == again
    assert [0] * 8 == [cached(answer) for answer in first]


def a_lost_replica_loses_no_request(served: str, checkpoint: Path) -> None:
    text = expected(checkpoint, "count: ", 400)
    names = replicas_of("Engine")
    assert NUM_REPLICAS == len(names)
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(post, served, prompt="count: ", max_tokens=400) for _ in range(8)]
        streams = [pool.submit(read_stream, served, begun, prompt="count: ", max_tokens=400) for _ in range(8)]
        for _ in streams:
            assert begun.acquire(timeout=300)
        kill(min(names))
        assert [text] * 8 == [answer.result()["choices"][0]["text"] for answer in answers]
        bodies = [stream.result() for stream in streams]
    assert all(body.endswith("data: [DONE]\n\n") for body in bodies)
    ended = [body for body in bodies if '"error"' in body]
    assert all("the replica that generated the answer was lost" in body for body in ended)
    assert all(text.startswith(text_of(body)) for body in ended)
    assert all(text == text_of(body) for body in bodies if body not in ended)
    assert 0 < len(ended) < 8
    eventually(lambda: NUM_REPLICAS == len(replicas_of("Engine") - {min(names)}), 300, pause=0.1)


def a_lost_frontend_is_replaced(served: str, checkpoint: Path) -> None:
    text, (name,) = expected(checkpoint, "count: ", 400), replicas_of("Frontend")
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(read_stream, served, begun, prompt="count: ", max_tokens=400) for _ in range(8)]
        for _ in streams:
            assert begun.acquire(timeout=300)
        kill(name)
        texts = [text_of(stream.result()) for stream in streams]
    assert all(text.startswith(part) for part in texts)
    assert text not in texts
    eventually(lambda: 0 == num_running(), 300, pause=0.1)
    eventually(lambda: 1 == len(replicas_of("Frontend") - {name}), 300, pause=0.1)
    assert text == post(served, prompt="count: ", max_tokens=400)["choices"][0]["text"]


def num_running() -> int:
    """Return the requests that one of the engines runs."""
    from ray import serve

    stats = serve.get_deployment_handle("Engine", "tiny").stats.remote().result()
    return int(stats.num_running + stats.num_waiting)


def an_update_loses_no_request(served: str, checkpoint: Path, stack_file: Path) -> None:
    text = expected(checkpoint, "update: ", 40)
    before, stop, answers = replicas_of("Engine"), threading.Event(), []

    def ask() -> None:
        while not stop.is_set():
            answers.append(post(served, prompt="update: ", max_tokens=40)["choices"][0]["text"])

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            deploy(model=str(checkpoint), stack=str(stack_file), name="renamed")
            eventually(lambda: not before & replicas_of("Engine"), 300, pause=0.1)
        finally:
            stop.set()
        for request in asking:
            request.result()
    assert {text} == set(answers)
    assert "renamed" == json.load(urllib.request.urlopen(f"{served}/v1/models", timeout=20))["data"][0]["id"]


@pytest.mark.timeout(900)
def test_engines_on_ray_serve(url: str, checkpoint: Path, stack_file: Path) -> None:
    # One test, because starting Ray and engines takes much longer than all that follows.
    deploy(model=str(checkpoint), stack=str(stack_file))
    answers_are_those_of_an_engine(url, checkpoint)
    a_prompt_of_megabytes_reaches_an_engine()
    each_conversation_finds_its_prefix(url)
    a_lost_replica_loses_no_request(url, checkpoint)


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_a_lost_frontend_is_replaced(url: str, checkpoint: Path, stack_file: Path) -> None:
    deploy(model=str(checkpoint), stack=str(stack_file), replicas="1")
    a_lost_frontend_is_replaced(url, checkpoint)


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_an_update_loses_no_request(url: str, checkpoint: Path, stack_file: Path) -> None:
    # Engines and frontends start anew, one after the other.
    deploy(model=str(checkpoint), stack=str(stack_file))
    an_update_loses_no_request(url, checkpoint, stack_file)


def test_waiting_tokens_and_full_engines_need_more_engines(loaded_ray: None) -> None:
    from kvframe_ray.scaling import ByWaitingTokens

    policy = ByWaitingTokens(target_tokens=1000, target_requests=10)

    def needed(tokens: list[float], requests: float) -> float:
        context: Any = SimpleNamespace(
            aggregated_metrics={"waiting_tokens": dict(enumerate(tokens))}, total_num_requests=requests
        )
        return policy(context)[0]

    assert 3.5 == needed([3000, 500], 2)
    assert 2.0 == needed([0, 100], 20)
    assert 0.0 == needed([], 0)


def test_page_stores_need_a_key(loaded_ray: None) -> None:
    from kvframe_ray.deploying import with_key

    with pytest.raises(StackError, match="the engines of a deployment need one key; set key in \\[cache\\]"):
        with_key(Stack.from_mapping({"cache": {"disk": {"path": "pages", "size": "1GiB"}}}))
