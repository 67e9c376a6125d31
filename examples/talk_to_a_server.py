"""Serve a model by OpenAI's interface, and talk to it with OpenAI's client: a stream, samples, log-probabilities.

``python examples/talk_to_a_server.py path/to/model`` starts ``kvframe serve``, asks, and stops it.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import openai


def main(path: str) -> None:
    """Serve the model of a folder, and ask it."""
    command = [sys.executable, "-m", "kvframe", "serve", path, "--port", "0", "--served-name", "model"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            # The client tries again until the server listens.
            ask(openai.OpenAI(base_url=address(server), api_key="anna", max_retries=5))
        finally:
            server.send_signal(signal.SIGTERM)


def address(server: subprocess.Popen[str]) -> str:
    """Wait until the server prints its address, and return the address."""
    lines = []
    for line in server.stderr or ():
        lines.append(line)
        if line.startswith("serving "):
            return line.split()[-1]
    raise SystemExit("".join(lines))


def ask(client: openai.OpenAI) -> None:
    """Ask for a stream, for samples, and for log-probabilities."""
    print("a stream:  ", end="")
    for part in client.completions.create(model="model", prompt="def fill(", max_tokens=16, stream=True):
        print(repr(part.choices[0].text), end=" ", flush=True)
    print()
    sampled = client.completions.create(model="model", prompt="class ", max_tokens=8, n=3, temperature=0.8, seed=1)
    for choice in sampled.choices:
        print(f"sample {choice.index}:   {choice.text!r}")
    likely = client.completions.create(model="model", prompt="import ", max_tokens=4, logprobs=2).choices[0].logprobs
    assert likely is not None
    columns = (likely.tokens or (), likely.token_logprobs or (), likely.top_logprobs or ())
    for token, value, top in zip(*columns, strict=True):
        print(f"token {token!r}: {value:.2f}, the likeliest: {', '.join(map(repr, top))}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".cache/demo-model")
