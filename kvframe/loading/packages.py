"""The table of names that kvframe's own packages provide, for errors about a name that is not installed.

A test compares the table with the names that the packages under ``plugins/`` register.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

_TABLE = """
kvframe-attention-free plugin:attention_free spec:encoder_only
kvframe-chunked-local plugin:chunked_local spec:chunked_local wrapper:chunked_local
kvframe-cpu plugin:cpu backend:cpu
kvframe-cross-attention plugin:cross_attention spec:cross_attention
kvframe-decode-only plugin:decode_only wrapper:decode_only
kvframe-disk plugin:disk page_store:disk
kvframe-draft-model plugin:draft_model proposer:draft_model
kvframe-engine command:chat command:embed command:generate command:top command:trace
kvframe-entries plugin:entries spec:token_entries spec:unfinished_group
kvframe-flash-attn plugin:flash_attn backend:flash_attn backend:flash_attn_3
kvframe-flashinfer plugin:flashinfer backend:flashinfer backend:flashinfer_mla
kvframe-flex plugin:flex backend:flex
kvframe-guided plugin:guided logits_processor:guided
kvframe-kv-formats plugin:kv_formats format:fp8_tensor format:fp8_token_head
kvframe-kv-formats format:int4_token_head format:int8_token_head
kvframe-mamba plugin:mamba spec:mamba
kvframe-mla plugin:mla spec:mla backend:mla
kvframe-mtp plugin:mtp proposer:mtp
kvframe-ngram plugin:ngram proposer:ngram
kvframe-numba plugin:numba backend:numba
kvframe-priority plugin:priority scheduling:priority
kvframe-scan-resistant plugin:scan_resistant eviction:scan_resistant
kvframe-serve plugin:serve command:serve
kvframe-sliding-window plugin:sliding_window spec:sliding_window
kvframe-testing command:check command:new-plugin
kvframe-torch plugin:torch backend:torch backend:torch_varlen
kvframe-transformers plugin:transformers model_adapter:transformers
kvframe-triton plugin:triton backend:triton backend:triton_mla
kvframe-valkey plugin:valkey page_store:valkey
kvframe-zmq plugin:zmq event_publisher:zmq
"""
"""On each line a package, then names that it provides, each after its kind in ``claims.KINDS``, or ``command``."""

PROVIDERS = {
    (kind, name): package
    for package, *claims in (line.split() for line in _TABLE.split("\n") if line)
    for kind, _, name in (claim.partition(":") for claim in claims)
}
"""The package of each kind and name."""


_ROOT = Path(__file__).resolve().parents[2]
"""The clone, if kvframe runs from one."""


def provider_of(kind: str, name: str) -> str | None:
    """Return the package of kvframe that provides a name; None if none does.

    Args:
        kind: A kind in ``claims.KINDS``, ``"plugin"`` or ``"command"``.
        name: The registered name or the plugin's, with or without the package before it (``"kvframe-x:x"``).
    """
    owner, _, bare = name.rpartition(":")
    package = PROVIDERS.get((kind, bare))
    return package if owner in ("", package) else None


def to_install(*packages: str) -> str:
    """Return the command that installs packages: from the clone that kvframe runs from, or by their names.

    From a clone, the command also names the folders that they require and that are not installed.
    """
    return " ".join(["pip install", *map(_source_of, _with_required(packages))])


def _with_required(packages: Sequence[str]) -> list[str]:
    """Return packages, and those of the clone that they require and that are not installed."""
    names = [*packages]
    for name in names:  # which grows
        folder = _folder_of(name)
        if folder is not None:
            project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            required = {re.split(r"[^\w-]", text)[0] for text in project["dependencies"]}
            absent = {other for other in required if _folder_of(other) and not any(distributions(name=other))}
            names += sorted(absent - {*names})
    return names


def _source_of(package: str) -> str:
    """Return what pip is told to install a package."""
    folder = _folder_of(package)
    if folder is None:
        return package
    with suppress(OSError, ValueError):  # the command is run in another folder, or in one that was removed
        folder = folder.relative_to(Path.cwd())
    return f"-e {shlex.quote(str(folder))}"


def to_run_models() -> str:
    """Return the command that installs what serves ordinary models: from the clone that kvframe runs from, or by name.

    That of a clone is run in its folder, which the paths in its file of requirements begin with.
    """
    return "pip install -r requirements.txt" if _folder_of("kvframe-engine") else "pip install 'kvframe[models]'"


def _folder_of(package: str) -> Path | None:
    """Return a package's folder in the clone that kvframe runs from; None if it runs from no clone."""
    name = package.removeprefix("kvframe-").replace("-", "_")
    folder = _ROOT / "kernels" if name == "kernels" else _ROOT / "plugins" / name
    return folder if (folder / "pyproject.toml").is_file() else None
