"""What a hostile call of the command line is made of: its options, files, streams and environment, drawn at random."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import attrs

from benchmarks.cli.fuzz_words import (
    COMMANDS,
    CONFIG_KEYS,
    ENVIRONMENTS,
    FILE_KEYS,
    FLAGS,
    GARBAGE,
    KINDS,
    LAYER_KEYS,
    OPTIONS,
    PLACES,
    QUERY_KEYS,
    RULE_KEYS,
    STACK_KEYS,
    STANDARD_FILES,
    VALUES,
    WORDS,
)


@attrs.frozen(kw_only=True)
class Inputs:
    """Good input, made once: what hostile input is made of.

    Attributes:
        folder: Where it is.
        model: A checkpoint with weights and a tokenizer.
        layers: A layer file.
    """

    folder: Path
    model: Path
    layers: Path


@attrs.frozen(kw_only=True)
class Case:
    """One call.

    Attributes:
        command: The command; ``""`` for none.
        arguments: What it is given, as bytes.
        files: Files to make in its folder, by name.
        written: Files that it is asked to write.
        stdin: What it may read.
        stdout: Where its output goes.
        closed: Standard streams that are closed.
        environment: Variables over the present ones.
        is_process: Whether Python is started anew.
        hostile: What about it is hostile, by kind.
    """

    command: str
    arguments: tuple[bytes, ...]
    files: dict[str, bytes]
    written: tuple[Path, ...]
    stdin: bytes
    stdout: str
    closed: tuple[int, ...]
    environment: dict[str, str]
    is_process: bool
    hostile: tuple[str, ...]

    def write_files(self, folder: Path) -> None:
        """Make the files of the call in its folder."""
        for name, make in STANDARD_FILES.items():
            make(folder / name)
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def in_words(self) -> str:
        """Return the call in one line."""
        told = " ".join(ascii(os.fsdecode(each))[1:-1][:80] or "''" for each in self.arguments)
        more = [f"{name}={value[:20]}" for name, value in self.environment.items()]
        more += [f"{number}>&-" for number in self.closed] + ([] if self.stdout == os.devnull else [f">{self.stdout}"])
        more += ["as a process"] if self.is_process else []
        return f"kvframe {told}" + (f" ({' '.join(more)})" if more else "")


def make_inputs(folder: Path) -> Inputs:
    """Make the good input."""
    from kvframe_transformers.testing import save_tiny
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = folder / "model"
    save_tiny(model, "llama")
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "hello": 1, "world": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(model)
    layers = folder / "layers.json"
    layer = {"name": "l.{}", "count": 2, "kind": "full_attention", "num_kv_heads": 2, "head_size": 8}
    layers.write_text(json.dumps({"max_model_len": 64, "layers": [layer]}))
    return Inputs(folder=folder, model=model, layers=layers)


def draw_case(chance: random.Random, inputs: Inputs, may_be_process: bool) -> Case:
    """Draw a call: a good one with a few things replaced by hostile ones."""
    return _Drawing(chance, inputs).draw(may_be_process)


class _Drawing:
    def __init__(self, chance: random.Random, inputs: Inputs) -> None:
        self.chance, self.inputs = chance, inputs
        self.files: dict[str, bytes] = {}
        self.written: list[Path] = []
        self.hostile: list[str] = []

    def draw(self, may_be_process: bool) -> Case:
        chance = self.chance
        command = chance.choice(COMMANDS)
        arguments = [command.encode(), *self.draw_command(command)]
        if chance.random() < 0.1:
            place = chance.randrange(len(arguments) + 1)
            arguments.insert(place, chance.choice((*WORDS, b"--nonsense", b"--help", b"--version", b"-h")))
            self.hostile.append("argument")
        environment: dict[str, str] = {}
        if chance.random() < 0.2:
            environment = chance.choice(ENVIRONMENTS)
            self.hostile.append("environment")
        closed: tuple[int, ...] = ()
        stdout = os.devnull
        if chance.random() < 0.12:
            closed = chance.choice(((0,), (1,), (2,), (0, 1), (0, 1, 2)))
            self.hostile.append("closed stream")
        elif chance.random() < 0.06:
            stdout = "/dev/full"
            self.hostile.append("full output")
        # Python reads the locale when it starts.
        at_start = {"LC_ALL", "PYTHONIOENCODING"} & environment.keys()
        is_process = may_be_process and (chance.random() < 0.05 or bool(at_start))
        return Case(
            command=command,
            arguments=tuple(argument.replace(b"\0", b"")[:120_000] for argument in arguments),
            files=self.files,
            written=tuple(self.written),
            stdin=chance.choice((b"", b"[[1, 2]]\n", b"hello\nworld\n", b"\xff\xfe", b"[" * 50_000, b"\0" * 10)),
            stdout=stdout,
            closed=closed,
            environment=environment,
            is_process=is_process,
            hostile=tuple(self.hostile),
        )

    def draw_command(self, command: str) -> list[bytes]:
        chance, given = self.chance, []
        if command != "plugins":
            given.append(os.fsencode(self.model(heavy=command in ("generate", "embed"))))
        if command == "generate":
            given += self.prompts()
        if command == "embed":
            given += [b"--token-ids", self.file("ids.json", self.prompts_content(ids=True))]
        if chance.random() < 0.45:
            given += [b"--stack", self.file("stack.toml", self.stack())]
        if command == "tune":
            given += [b"--context", b"8", b"--backend", b"torch", b"--table", self.table()]
        for option in chance.sample(OPTIONS[command], min(len(OPTIONS[command]), chance.choice((0, 0, 1, 1, 2, 3)))):
            given.append(option.encode())
            if option not in FLAGS:
                self.hostile.append("option")
                path_like = option in ("--load-prefixes", "--save-prefixes")
                given.append(self.path(option) if path_like else chance.choice(WORDS))
        return given

    def path(self, option: str) -> bytes:
        name = self.chance.choice((*PLACES, "new"))
        if option == "--save-prefixes":
            self.written.append(Path(name))
        return os.fsencode(name)

    def table(self) -> bytes:
        if self.chance.random() < 0.4:
            self.hostile.append("table")
            places = (*PLACES, str(self.inputs.model / "config.json"), str(self.inputs.layers))
            name = self.chance.choice(places)
            self.written.append(Path(name))
            return os.fsencode(name)
        self.written.append(Path("new.json"))
        return b"new.json"

    def model(self, *, heavy: bool) -> str:
        """Return a model: a good one, a hostile path, or a folder or layer file with something wrong in it."""
        chance, kind = self.chance, self.chance.random()
        if kind < 0.3:
            return str(self.inputs.model if heavy or chance.random() < 0.3 else self.inputs.layers)
        self.hostile.append("model")
        if kind < 0.4:
            return chance.choice(PLACES)
        if kind < 0.75 and not heavy:
            self.files["layers.json"] = self.mutated_layers()
            return "layers.json"
        config = json.loads((self.inputs.model / "config.json").read_text())
        for _ in range(chance.choice((1, 1, 2, 4))):
            config[chance.choice(CONFIG_KEYS)] = self.value()
        self.files["model/config.json"] = self.dumped(config)
        if chance.random() < 0.8:
            names = ["model.safetensors"]
            names += ["tokenizer.json", "tokenizer_config.json"] if chance.random() < 0.5 else []
            for name in names:
                self.files[f"model/{name}"] = self.damaged((self.inputs.model / name).read_bytes())
        if chance.random() < 0.3:
            self.files["model/generation_config.json"] = self.dumped({"eos_token_id": self.value()})
        if chance.random() < 0.2:
            self.files["model/adapter_config.json"] = b'{"base_model_name_or_path": "a/b"}'
        return "model"

    def damaged(self, content: bytes) -> bytes:
        if self.chance.random() < 0.8:
            return content
        place = self.chance.randrange(len(content))
        flipped = content[:place] + b"\xff" + content[place + 1 :]
        return self.chance.choice((content[:place], flipped, content + b"x", b""))

    def mutated_layers(self) -> bytes:
        chance = self.chance
        layer: dict[str, Any] = {
            "name": "l.{}",
            "count": 2,
            "kind": chance.choice(KINDS),
            "num_kv_heads": 2,
            "head_size": 8,
        }
        file: dict[str, Any] = {"max_model_len": 64, "layers": [layer, dict(layer, name="m.{}")]}
        for _ in range(chance.choice((1, 1, 2, 3))):
            kind = chance.random()
            if kind < 0.3:
                file[chance.choice(FILE_KEYS)] = self.value()
            elif kind < 0.8:
                layer[chance.choice(LAYER_KEYS)] = self.value()
            else:
                layer["query"] = {chance.choice(QUERY_KEYS): self.value()}
        return self.dumped(file)

    def dumped(self, value: Any) -> bytes:
        if self.chance.random() < 0.05:
            return self.garbage()
        return json.dumps(value, ensure_ascii=self.chance.random() < 0.5).encode(errors="surrogatepass")

    def garbage(self) -> bytes:
        return self.chance.choice(GARBAGE)

    def value(self) -> Any:
        return self.chance.choice(VALUES)

    def stack(self) -> bytes:
        chance = self.chance
        self.hostile.append("stack")
        if chance.random() < 0.15:
            return self.garbage()
        lines = []
        for table in chance.sample([*STACK_KEYS], chance.choice((1, 1, 2))):
            lines.append(f"[{table}]")
            keys = STACK_KEYS[table]
            chosen = chance.sample(keys, min(len(keys), chance.choice((1, 1, 2))))
            lines += [f"{key} = {in_toml(self.value())}" for key in chosen]
        for _ in range(chance.choice((0, 0, 1, 2))):
            lines.append("[[rules]]")
            good = {"layers": "*"} if chance.random() < 0.7 else {}
            rule = {**good, **{key: self.value() for key in chance.sample(RULE_KEYS, chance.choice((1, 2)))}}
            lines += [f"{key} = {in_toml(value)}" for key, value in rule.items()]
        return "\n".join(lines).encode(errors="surrogatepass")

    def prompts(self) -> list[bytes]:
        chance, kind = self.chance, self.chance.random()
        if kind < 0.3:
            return [b"--prompt", b"hello world"]
        if kind < 0.5:
            self.hostile.append("prompt")
            return [b"--prompt", chance.choice(WORDS)]
        self.hostile.append("prompts")
        if kind < 0.75:
            name = chance.choice(("p.txt", "p.json", "p.jsonl"))
            return [b"--prompts", self.file(name, self.prompts_content(ids=False))]
        return [b"--prompt-token-ids", self.file("ids.json", self.prompts_content(ids=True))]

    def prompts_content(self, *, ids: bool) -> bytes:
        chance = self.chance
        if chance.random() < 0.2:
            return self.garbage()
        good: list[Any] = [[1, 2, 3], [7]] if ids else ["hello", "world"]
        return self.dumped([*good, *(self.value() for _ in range(chance.choice((0, 1, 3))))])

    def file(self, name: str, content: bytes) -> bytes:
        if self.chance.random() < 0.2:
            self.hostile.append("path")
            return os.fsencode(self.chance.choice(PLACES))
        self.files[name] = content
        return name.encode()


def in_toml(value: Any) -> str:
    """Return a value as TOML has it; what TOML lacks as a text."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return '"None"'
    if isinstance(value, list):
        return f"[{', '.join(map(in_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {in_toml(each)}' for key, each in value.items())} }}"
    return json.dumps(value) if isinstance(value, str) else repr(value)
