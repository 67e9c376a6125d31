"""The values that hostile calls of the command line are made of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DEEP = 100_000


def _words(text: str) -> list[str]:
    return text.split()


COMMANDS = ("generate", "embed", "plan", "explain", "tune", "plugins")
KINDS = ("full_attention", "sliding_window", "mla")

_NUMBERS = b"0 -1 1 3 1e9 1e400 nan inf -inf 0x10 1_0 1.5".split()
_NAMES = b"auto cpu cpu:999 cuda cuda:99 meta mps float32 float8 bfloat16 mean torch torhc".split()
_SIZES = b"2GiB 1KiB 10EiB 1000000TiB 64MiB".split()
_LONG = (b"1" + b"0" * 18, b"9" * 30, b"9" * 5000, b"x" * 300, b"x" * 5000, b"x" * 100_000)
_TEXTS = (
    "é😀".encode(),
    "١٢".encode(),
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"a\nb",
    b"\x1b[31mred",
    b"%s%n",
    b"{}",
    b"[[",
    b"../..",
)
WORDS: tuple[bytes, ...] = (
    b"",
    b" ",
    b"-",
    b"--",
    b"x",
    b"*",
    b"kvframe-torch:torch",
    b"a:b:c",
    b"null",
    *_NUMBERS,
    *_NAMES,
    *_SIZES,
    *_LONG,
    *_TEXTS,
)
"""Values of options, each of them wrong for most."""

_DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/stdin", "-"]
_ELSEWHERE = ["none", "none/none", "~", "file://x", "https://example.com/model", "meta-llama/Llama-3.1-8B"]

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 16, 10**9, 2**31, 10**18, 10**19, 0.5, -0.0, 1e308, float("inf"), float("nan")),
    *("", " ", "x", "x" * 5000, "é😀", "\ud800", "a\u0000b", "/dev/zero"),
    *_words(
        "auto torch cpu float32 int4 2GiB 10EiB full_attention sliding_window mamba decode_only chunked_local lru off"
    ),
    *([], [[]], [0], ["x"], [1, "x"], [{}], [{"name": "decode_only"}]),
    *({}, {"x": 1}, {"name": "x"}, {"name": "torch", "windw": 1}, {"name": 3}),
)
"""Values of keys in files."""

STACK_KEYS: Mapping[str, Sequence[str]] = {
    "plugins": ["disabled", "required", "owners", "x"],
    "plugin": ["transformers", "x"],
    "cache": _words("memory block_size hybrid dtype format prefix_caching eviction preemption swap_memory audit key x"),
    "engine": _words(
        "max_num_seqs max_num_batched_tokens max_model_len device dtype self_check prefill_skipping measured_times "
        "compile graphs graph_query_lens reserve_prompts x"
    ),
    "x": ["y"],
}
RULE_KEYS = ["kind", "layers", "spec", "wrappers", "backend", "optional", "x"]
FILE_KEYS = ["name", "max_model_len", "max_encoder_len", "repeat", "layers", "x"]
LAYER_KEYS = _words("name names count kind shares_with query num_kv_heads head_size window dtype format x")
QUERY_KEYS = ["num_heads", "head_size", "scale", "soft_cap", "has_sinks", "relative_bias", "x"]
CONFIG_KEYS = _words(
    "model_type architectures hidden_size num_hidden_layers num_attention_heads vocab_size num_key_value_heads "
    "intermediate_size max_position_embeddings rope_parameters rope_scaling layer_types num_labels "
    "attn_implementation auto_map quantization_config eos_token_id dtype tie_word_embeddings is_encoder_decoder "
    "is_decoder text_config head_dim x"
)

FLAGS = ["--json", "--hybrid", "--no-hybrid", "--normalize", "--no-normalize", "--prompt-logprobs", "--help"]
OPTIONS: Mapping[str, Sequence[str]] = {
    "generate": _words(
        "--max-new-tokens --temperature --top-k --top-p --seed --n --stop --prompt-logprobs --cache-salt "
        "--load-prefixes --save-prefixes --memory --block-size --device --dtype --json --prompt"
    ),
    "embed": ["--pooling", "--normalize", "--cache-salt", "--memory", "--block-size", "--device", "--dtype", "--json"],
    "plan": _words("--memory --max-model-len --dtype --block-size --hybrid --no-hybrid --num-tokens --json"),
    "explain": ["--device", "--dtype", "--json"],
    "tune": ["--device", "--dtype", "--context", "--backend", "--json"],
    "plugins": ["--json", "--help"],
}

ENVIRONMENTS: tuple[dict[str, str], ...] = (
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"XDG_CACHE_HOME": "/dev/null", "KVFRAME_TIMES": ""},
    *({"LC_ALL": value} for value in ("C", "nonsense")),
    *({"KVFRAME_TIMES": value} for value in ("/dev/zero", "x" * 5000, "/")),
    *({"COLUMNS": value} for value in ("0", "-5", "x" * 100)),
    *({"HOME": "/none"}, {"TMPDIR": "/none"}, {"PYTHONIOENCODING": "latin-1"}, {"NO_COLOR": "1"}, {"TERM": "dumb"}),
)

GARBAGE: tuple[bytes, ...] = (
    *(b"", b"\xef\xbb\xbf{}", b"\xff\xfe", b"\0" * 100, b"NaN", b'"\\ud800"', b"// no", b"a = 1\na = 2", b"[a]\n[a]"),
    *(b"[" * DEEP, b'{"a":' * DEEP, b"a" + b".a" * 5000 + b"=1"),
    *(b"9" * 5000, b"[" + b"9" * 5000 + b"]", b"x = 0x" + b"f" * 9000),
    b"".join(b"k%d = 1\n" % number for number in range(3000)),
)
"""Contents of files, each of them wrong for all."""


def make_huge(path: Path) -> None:
    """Make a file of a TiB that takes no room."""
    path.touch()
    os.truncate(path, 1 << 40)


STANDARD_FILES: Mapping[str, Callable[[Path], Any]] = {
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "circle": lambda path: path.symlink_to("circle"),
    "huge": make_huge,
    "empty": lambda path: path.touch(),
    "bytes.json": lambda path: path.write_bytes(b"\xff\xfe\x00{"),
    "deep.json": lambda path: path.write_text("[" * DEEP),
    "deep.toml": lambda path: path.write_text("a = " + "[" * DEEP),
    "closed.json": lambda path: path.write_text('{"max_model_len": 8, "layers": ['),
}
"""What is in the folder of every call."""

PLACES: tuple[str, ...] = (
    *("", ".", "/", "a\nb", "é\udcff", "\x1b[31m", "x" * 300, "x" * 5000),
    *(*_DEVICES, *_ELSEWHERE, *STANDARD_FILES),
)
"""Paths, most of them of nothing that a command could use."""
