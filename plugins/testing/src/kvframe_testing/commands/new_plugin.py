"""``kvframe new-plugin``: write a distribution that works, with its tests, for an author to change."""

from __future__ import annotations

import errno
import keyword
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import click

from kvframe.cli.options import TEXT_TYPE
from kvframe.contract.errors import FileError, PluginError, shown
from kvframe.contract.hookspecs import API_VERSION
from kvframe.loading.claims import KINDS, Kind

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".template"

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_MAX_NAME = 24
_DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "backend": "An attention backend.",
        "spec": "An attention type.",
        "wrapper": "A wrapper of batch metadata.",
        "format": "A format of stored keys and values.",
        "eviction": "An eviction policy of the prefix cache.",
        "scheduling": "A scheduling policy of requests.",
        "page_store": "A store of computed pages.",
        "event_publisher": "A publisher of cache events.",
        "proposer": "A proposer of draft tokens.",
        "logits_processor": "A logits processor.",
        "adapter": "An adapter for models in plain torch.",
    }
)
"""What a plugin of each kind is, in a sentence; the keys are the kinds."""

_OF_ENGINE = ("logits_processor", "proposer", "scheduling")
"""The kinds that only the engine serves, whose classes come from its contract."""

_SERVED = ("adapter", *_OF_ENGINE)
"""The kinds whose tests need the engine."""

_COMPUTE = ("adapter", "backend", "logits_processor", "wrapper")
"""The kinds that import torch."""

_ENGINE = "kvframe-engine>=0.9"


@click.command("new-plugin", short_help="Write a plugin that works, with its tests.")
@click.argument("name", type=TEXT_TYPE)
@click.option(
    "--kind",
    required=True,
    type=click.Choice([*_DESCRIPTIONS]),
    metavar="KIND",
    help=f"What the plugin adds: {', '.join(_DESCRIPTIONS)}.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The folder to write; it must not exist, or be empty. Default: kvframe-NAME.",
)
def new_plugin(name: str, kind: str, directory: Path | None) -> None:
    """Write a distribution with a plugin that registers NAME, such as "own_window".

    It has a pyproject.toml, a licence, a manifest, a typed implementation, its tests by the kit, and a README. The next
    three commands are printed.
    """
    _check_name(name, KINDS["model_adapter" if kind == "adapter" else kind])
    folder = Path(f"kvframe-{_dashed(name)}") if directory is None else directory
    files = render(name, kind)
    try:
        _check_free(folder)
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(f"{folder} cannot be written: {error.strerror or error}") from error
    check = "kvframe plugins" if kind == "adapter" else f"kvframe check {name}"
    click.echo(f"{folder} holds the {kind} {name!r}, in {len(files)} files. Next:\n")
    for command in (f"pip install -e '{folder}[test]'", check, f"pytest {folder}"):
        click.echo(f"  {command}")


def render(name: str, kind: str) -> dict[str, str]:
    """Return the files of a plugin, by their path in its folder."""
    words = {
        "own_part": name,
        "own-part": _dashed(name),
        "OwnPart": "".join(part.capitalize() for part in name.split("_")),
        "{description}": _DESCRIPTIONS[kind],
        "{api}": f"v{API_VERSION.replace('.', '_')}",
        "{keyword}": _dashed(kind),
        "{dependencies}": _quoted(
            "attrs>=23.2", "kvframe>=0.9", *[_ENGINE] * (kind in _OF_ENGINE), *["torch>=2.11"] * (kind in _COMPUTE)
        ),
        "{test}": _quoted(*[_ENGINE] * (kind in _SERVED), "kvframe-testing>=0.9", "pytest>=8"),
    }
    return {
        str(path.relative_to(root)).removesuffix(SUFFIX).replace("own_part", name): _replaced(path, words)
        for root in (TEMPLATES / "common", TEMPLATES / kind)
        for path in _files(root)
    }


def _files(root: Path) -> Iterator[Path]:
    yield from sorted(path for path in root.rglob(f"*{SUFFIX}") if path.is_file())


def _replaced(path: Path, words: Mapping[str, str]) -> str:
    text = path.read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def _quoted(*requirements: str) -> str:
    return ", ".join(f'"{requirement}"' for requirement in requirements)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _check_name(name: str, kind: Kind) -> None:
    """Raise ``PluginError`` for a name that cannot be registered, or is another plugin's already."""
    from kvframe.loading.plugins import load_plugins

    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        near = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()).strip("_0123456789")
        hint = f"; try {near[:_MAX_NAME].rstrip('_')}" if _NAME.fullmatch(near[:_MAX_NAME].rstrip("_")) else ""
        raise PluginError(
            f"a plugin's name is snake_case, like own_window, of at most {_MAX_NAME} characters, not "
            f"{shown(name)}{hint}"
        )
    if keyword.iskeyword(name) or name in kind.reserved or name == "kvframe":
        raise PluginError(f"the name {name!r} is reserved; choose another")
    host = load_plugins()
    owners = {entry.owner for entry in host.registry.claims(name)}
    owners |= {record.distribution for record in host.records if record.name == name}
    if owners:
        raise PluginError(f"the name {name!r} is registered by {', '.join(sorted(owners))}; choose another")
    if f"kvframe_{name}" in sys.modules:
        raise PluginError(f"there is a package kvframe_{name} already; choose another name")


def _check_free(folder: Path) -> None:
    """Raise ``FileError`` if something would be overwritten."""
    try:
        is_empty = not any(folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOTDIR:
            raise
        is_empty = False
    if not is_empty:
        raise FileError(f"{folder} exists, and nothing is overwritten; give another --directory")
