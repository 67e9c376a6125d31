"""Install plugins that are broken at random beside a healthy one, and see that each fails alone and by its name.

    python -m benchmarks.cli.fuzz_plugins [--count N] [--seed N] [--together N]

benchmarks/README.md says what is checked.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import attrs
import click

from benchmarks.cli.broken_plugins import PRELUDE, Broken, make_broken, stack_that_names
from benchmarks.harness.pages import heading, table
from benchmarks.harness.record import benchmark

PROMPTS = [[5, 17, 3, 99, 42, 7, 8, 20, 64], [1, 2]]
NUM_NEW_TOKENS = 8
TIMEOUT_S = 300
HEALTHY = """
from kvframe.builtin.torch_reference import TorchReferenceBackend
import attrs
class Healthy(TorchReferenceBackend):
    capabilities = attrs.evolve(TorchReferenceBackend.capabilities, preference=500)
"""
HEALTHY_MANIFEST = f"""{PRELUDE}
@hookimpl
def kvframe_register_backends(register):
    register("healthy", "kvframe_healthy.thing:Healthy")
"""
LAYERS = """
max_model_len = 64
[[layers]]
name = "layers.0"
kind = "KIND"
num_kv_heads = 1
head_size = 8
query = { num_heads = 1, head_size = 8, scale = 1.0 }
"""


class Wrong(Exception):
    """Something ended as it must not."""


def install(site: Path, broken: Broken) -> None:
    """Write a plugin's package and its ``.dist-info`` folder."""
    package = site / f"kvframe_{broken.name}"
    package.mkdir()
    (package / "__init__.py").touch()
    manifest = broken.manifest if isinstance(broken.manifest, bytes) else broken.manifest.encode()
    (package / "manifest.py").write_bytes(manifest)
    if broken.thing:
        (package / "thing.py").write_text(broken.thing, encoding="utf-8")
    info = site / f"kvframe_{broken.name}-1.0.dist-info"
    info.mkdir()
    module = f"kvframe_{broken.name}.manifest"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {broken.distribution}\nVersion: 1.0\n".encode(),
        "entry_points.txt": f"[kvframe.v1]\n{broken.name} = {module}\n[kvframe.v1.api]\n{broken.name} = v1_0".encode(),
        **broken.files,
    }
    for name, content in files.items():
        (info / name).write_bytes(content)


@attrs.frozen
class Shell:
    """The command line, with a folder of plugins on the path."""

    site: Path

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run kvframe; return its exit code and what it printed."""
        paths = [str(self.site), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        done = subprocess.run(
            [sys.executable, "-m", "kvframe", *arguments],
            capture_output=True,
            text=True,
            errors="backslashreplace",
            check=False,
            timeout=TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        if "Traceback" in done.stderr or done.returncode not in (0, 2):
            raise Wrong(f"kvframe {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")
        return done.returncode, done.stdout, done.stderr

    def json(self, *arguments: str) -> Any:
        """Run a command that must succeed, and return the document that it prints."""
        code, out, err = self.run(*arguments, "--json")
        if code:
            raise Wrong(f"kvframe {' '.join(arguments)} ended with {code}: {err[-2000:]}")
        try:
            return json.loads(out)
        except ValueError as error:
            raise Wrong(f"kvframe {' '.join(arguments)} printed no JSON: {out[:500]!r}") from error


def check_together(shell: Shell, model: Path, group: Sequence[Broken], expected: Any) -> None:
    """Run every command beside a group of broken plugins that no stack names; raises ``Wrong``."""
    found = shell.json("plugins")
    status = {plugin["name"]: plugin["status"] for plugin in found["plugins"]}
    if status["healthy"] != "loaded" or status["builtin"] != "loaded":
        raise Wrong(f"the healthy plugin is {status['healthy']}")
    layers = shell.site / "layers.toml"
    layers.write_text(LAYERS.replace("KIND", "full_attention"), encoding="utf-8")
    shell.json("plan", str(layers), "--memory", "1MiB")
    explained = json.dumps(shell.json("explain", str(model)))
    if "kvframe-healthy:healthy" not in explained:
        raise Wrong("the healthy backend serves no layer")
    if generate(shell, model) != expected:
        raise Wrong("beside the broken plugins other tokens were generated")


def generate(shell: Shell, model: Path) -> Any:
    """Return the tokens of the prompts, as ``kvframe generate --json`` prints them."""
    prompts = shell.site / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS), encoding="utf-8")
    arguments = ["--prompt-token-ids", str(prompts), "--max-new-tokens", str(NUM_NEW_TOKENS), "--memory", "1MiB"]
    printed = shell.json("generate", str(model), *arguments)
    return [output["token_ids"] for output in printed["outputs"]]


def use_by_name(broken: Broken, site: Path) -> str:
    """Use what is broken, in this process, as a stack that names it does; return how it ends.

    Returns:
        ``refused`` with a sentence, or ``used`` if the break hurts nothing.

    Raises:
        Wrong: It ends otherwise.
    """
    from kvframe import KVCacheManager, Stack, group_layers, load_plugins, make_layer_specs, plan_cache
    from kvframe.contract.errors import KVFrameError
    from kvframe.engine.assembly import find_page_copier

    stack = Stack.from_mapping(stack_that_names(broken))
    sentence = ""
    try:
        registry = load_plugins(stack.plugins).registry
        stack.check(registry)
        kind = broken.name if broken.kind == "spec" else "full_attention"
        description = _describe(site, kind)
        layers = make_layer_specs(description, registry, stack, "float32")
        grouping = group_layers(layers)
        plan = plan_cache(grouping, memory_bytes=1 << 20, max_model_len=64, max_num_batched_tokens=64)
        if broken.kind in ("backend", "wrapper"):
            import torch

            from kvframe.attention.group import form_groups
            from kvframe.selection.select import select_backends

            choices = select_backends(layers, stack, registry, "cpu")
            find_page_copier(choices)
            form_groups(layers, choices, grouping, torch.device("cpu"))
        if broken.kind == "policy":
            from kvframe.config.eviction_choice import make_policy

            KVCacheManager(plan, max_num_seqs=1, eviction=make_policy(stack, registry))
        if broken.kind == "adapter":
            registry.model_adapters.load(broken.name)
    except KVFrameError as error:
        sentence = str(error)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise Wrong(f"named by a stack it raises {type(error).__name__}") from error
    if sentence and (not sentence.isprintable() or broken.name not in sentence or len(sentence) > 5000):
        raise Wrong(f"named by a stack it ends with: {sentence[:500]!r}")
    return "refused" if sentence else "used"


def _describe(site: Path, kind: str) -> Any:
    from kvframe.planning.layer_file import read_layer_file

    path = site / f"layers_{kind}.toml"
    path.write_text(LAYERS.replace("KIND", kind), encoding="utf-8")
    return read_layer_file(path)


def in_groups(count: int, seed: int, together: int) -> Iterator[list[Broken]]:
    """Yield the broken plugins, as many together as are installed beside each other."""
    for start in range(0, count, together):
        numbers = range(start, min(start + together, count))
        yield [make_broken(f"broken_{seed}_{number}", Random(f"{seed} {number}")) for number in numbers]


def fuzz(count: int, seed: int, together: int, with_commands: bool = True) -> dict[str, Any]:
    """Break plugins and return what happened: ``ended`` by what was broken, and ``wrong``.

    Args:
        count: How many plugins.
        seed: Draws them.
        together: How many are installed beside each other.
        with_commands: Whether commands of processes of their own are run beside them.
    """
    ended: dict[str, Counter[str]] = {}
    wrong: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        expected: Any = None
        for number, group in enumerate(in_groups(count, seed, together)):
            site = Path(folder) / f"site_{number}"
            site.mkdir()
            install(site, Broken(name="healthy", what="healthy", manifest=HEALTHY_MANIFEST, thing=HEALTHY))
            if with_commands and expected is None:
                from kvframe_transformers.testing import save_tiny

                save_tiny(model, "llama")
                expected = generate(Shell(site), model)
            for broken in group:
                install(site, broken)
            if with_commands:
                try:
                    check_together(Shell(site), model, group, expected)
                except (Wrong, subprocess.TimeoutExpired) as error:
                    wrong[f"{group[0].name} to {group[-1].name}"] = str(error)
            sys.path.insert(0, str(site))
            importlib.invalidate_caches()
            stdout = sys.stdout
            try:
                for broken in group:
                    try:
                        how = use_by_name(broken, site)
                    except Wrong as error:
                        how, wrong[f"{broken.name}: {broken.what}"] = "wrong", f"{error}: {error.__cause__!r:.500}"
                    ended.setdefault(broken.what, Counter())[how] += 1
            finally:
                sys.stdout = stdout
                sys.path.remove(str(site))
            if with_commands:
                click.echo(f"{(number + 1) * together} of {count}, {len(wrong)} wrong", err=True)
    # The folder of the run is another one in each.
    said = {what: text.replace(folder, "FOLDER") for what, text in wrong.items()}
    return {"count": count, "seed": seed, "ended": {what: dict(ways) for what, ways in ended.items()}, "wrong": said}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    ends = ("refused", "used", "wrong")
    rows = [
        (what, str(sum(ways.values())), *(str(ways.get(end, 0)) for end in ends))
        for what, ways in sorted(record["ended"].items())
    ]
    what = (
        f": {record['count']} plugins, broken at random (seed {record['seed']}): {len(record['wrong'])} ended in a "
        "traceback, a crash, a hang, a wrong token or a sentence that does not name them."
    )
    lines = [*heading("Broken plugins", record["machine"], what, how="Run"), ""]
    heads = ("what is broken", "plugins", "refused by name when a stack names it", "hurts nothing", "wrong")
    return "\n".join([*lines, *table(heads, rows)]) + "\n"


@benchmark("fuzz_plugins", write_report, fails=lambda record: bool(record["wrong"]))
@click.option("--count", default=300, show_default=True, help="How many plugins to break.")
@click.option("--seed", default=1, show_default=True, help="Draws what is broken.")
@click.option("--together", default=100, show_default=True, help="How many are installed beside each other.")
def main(count: int, seed: int, together: int) -> dict[str, Any]:
    """Break plugins, and record how that ends."""
    found = fuzz(count, seed, together)
    for where, what in found["wrong"].items():
        click.echo(f"{where}: {what}", err=True)
    return found


if __name__ == "__main__":
    main()
