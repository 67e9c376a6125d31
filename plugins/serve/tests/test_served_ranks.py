"""``kvframe serve`` over two ranks answers as one process does; if a rank fails, every client is told and all end."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from kvframe_transformers.testing import save_tiny

from plugins.serve.tests.on_served_ranks import BREAK, Client
from tests.loading.fake_distributions import FakeSite, registers
from tests.programs import run_program, start_program
from tests.support.ports import free_port
from tests.support.waiting import eventually

ENDED = "the engine has ended, because one of its ranks failed"

STACK = """
[cache]
memory = "4MiB"

[[rules]]
layers = "*"
backend = "breaking"
"""

BACKEND = f"""
import os
from pathlib import Path

from kvframe_torch.backend import TorchBackend


class Breaking(TorchBackend):
    def attend(self, *arguments, **named):
        if Path(os.environ[{BREAK!r}] + os.environ.get("RANK", "")).exists():
            raise RuntimeError("attention is broken")
        return super().attend(*arguments, **named)
"""


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models of other weights, a stack, and a plugin whose attention can be broken."""
    root = tmp_path_factory.mktemp("served_ranks")
    shutil.copytree(checkpoint, root / "tiny")
    shutil.copytree(checkpoint, root / "other")
    save_tiny(root / "other", "llama", seed=1, vocab_size=256)
    (root / "stack.toml").write_text(STACK)
    (root / "site").mkdir()
    manifest = registers("backends", ("breaking", "kvframe_breaking.backend:Breaking"))
    FakeSite(root / "site").add("kvframe-breaking", "breaking", manifest, files={"backend": BACKEND})
    return root


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What clients got, by what happened to the ranks; computed once, whichever test process asks first."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "served_ranks.json"
    with FileLock(out.with_suffix(".lock")):
        if not out.exists():
            program = ("-m", "plugins.serve.tests.on_served_ranks", str(folder))
            process = run_program(*program, packages=folder / "site")
            assert 0 == process.returncode, process.stderr
            out.write_text(process.stdout)
    results: Mapping[str, Any] = json.loads(out.read_text())
    return results


def test_after_sigterm_both_ranks_complete_what_runs(served: Mapping[str, Any]) -> None:
    result = served["end_all"]
    assert served["text"] == result["text"]
    assert '"finish_reason":"length"' in result["rest"], result["said"]
    assert result["rest"].endswith("data: [DONE]\n\n")
    assert ([-15, 0], "") == (result["codes"], result["said"][1])
    assert "error" not in result["said"][0]


@pytest.mark.parametrize(
    ("run", "codes", "sentence"),
    [
        ("raise_on_1", [71, 71], "RuntimeError: attention is broken\n"),
        ("kill_1", [71, -9], "kvframe: error: rank 1 is lost: its process was killed or its machine was lost"),
    ],
)
def test_clients_are_told_that_a_rank_failed_and_all_ranks_end(
    served: Mapping[str, Any], run: str, codes: list[int], sentence: str
) -> None:
    result = served[run]
    assert (codes, "") == (result["codes"], result["said"][1])
    assert result["first"].startswith("data: {")
    assert ENDED in result["end"][0]
    assert ["data: [DONE]", ""] == result["end"][1:]
    assert [500, ENDED] == [result["whole"][0], json.loads(result["whole"][1])["error"]["message"]]
    assert result["health"] in (503, "closed")
    assert sentence in result["said"][0]
    assert "Traceback" not in result["said"][0]


def test_a_request_that_comes_while_a_rank_is_waited_for_is_refused(served: Mapping[str, Any]) -> None:
    status, body = served["raise_on_1"]["late"]
    assert status in (500, 503)  # 500 if it came before the step
    assert ENDED == json.loads(body)["error"]["message"]


def test_ranks_with_other_weights_are_refused(served: Mapping[str, Any]) -> None:
    result = served["different"]
    assert ([2, 71], "") == (result["codes"], result["said"][1])
    assert result["said"][0].startswith("kvframe: error: rank 1 has other weights of other than rank 0: ")


def test_torchrun_ends_when_a_step_fails_on_the_rank_that_serves(folder: Path) -> None:
    port = free_port()
    log, broken = folder / "log", str(folder / "break")
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, BREAK: broken}
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "kvframe")
    options = ("--stack", str(folder / "stack.toml"), "--port", str(port), "--grace", "60")
    with log.open("w") as file:
        files = {1: file.fileno(), 2: file.fileno()}
        torchrun = start_program((*ranks, "serve", str(folder / "tiny"), *options), files, environment=environment)
    try:
        client = Client(port)
        assert client.wait(torchrun.is_alive), log.read_text()
        # Rank 0 alone has reading processes: two, and the one that they are forked from.
        assert 3 == sum("multiprocessing.forkserver" in command for command in commands_of(broken))
        result = client.stream_during(Path(f"{broken}0").touch)
        torchrun.join(60)
        output = log.read_text()
        assert 1 == torchrun.exitcode, output
    finally:
        torchrun.kill()
        torchrun.join()
    assert ENDED in result["end"][0]
    assert ["data: [DONE]", ""] == result["end"][1:]
    assert [500, ENDED] == [result["whole"][0], json.loads(result["whole"][1])["error"]["message"]]
    assert result["health"] in (503, "closed")
    assert f"error: {ENDED}\n" in output
    # torchrun ends the other ranks once it sees that one has failed, and lists those that it has seen.
    assert {"71"} == set(re.findall(r"\n +rank +: \d .*\n +exitcode +: (-?\d+) ", output)), output
    assert len(output) < 64 << 10
    eventually(lambda: [] == commands_of(broken))


def commands_of(broken: str) -> list[str]:
    """Return the commands of the ranks and of the processes that they have started."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if broken.encode() in (process / "environ").read_bytes():
                commands.append((process / "cmdline").read_text())
        except OSError:  # it has ended, or is another user's
            continue
    return commands
