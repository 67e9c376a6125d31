"""Finds the folder of a model: a path, or a repository's id on the Hugging Face Hub (``Qwen/Qwen3-0.6B``).

A branch, tag or commit may follow: ``Qwen/Qwen3-0.6B@main``.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

from kvframe.contract.errors import FileError, ModelError, nearest_of, shorten
from kvframe.contract.files import exists
from kvframe.contract.foreign import safe_text
from kvframe.loading.packages import to_install

_REPOSITORY = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.ASCII
)

READER = "kvframe-transformers"
"""The package that reads repositories; it requires huggingface_hub."""

CONFIG_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")
"""What a plan reads of a repository."""

RUN_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""What a run reads of a repository: configs, weights and the tokenizer; never pickled files."""

LEFT_OUT = ("*/*.safetensors", "consolidated*")
"""Weights that repositories hold again in another form."""


def find_model(model: Path | str, *, weights: bool) -> Path:
    """Return the path of a model, downloading what is missing of a repository into the cache of huggingface_hub.

    Args:
        model: A path; or ``owner/name`` or ``owner/name@revision`` if there is no such file or folder.
        weights: Whether the model will run; otherwise only its config is downloaded.

    Raises:
        ModelError: There is no such path, and it is no repository, or the repository cannot be downloaded.
    """
    model = Path(model)
    try:
        is_there = exists(model)
    except FileError as error:
        raise ModelError(f"{shorten(str(model))} {error}") from error
    if is_there:
        return model
    match = _REPOSITORY.fullmatch(str(model))
    if match is None:
        raise ModelError(_not_there(model))
    return _download(match["id"], match["revision"], weights)


def _not_there(path: Path) -> str:
    """Return that a path does not exist, with the name in its folder that is most like its own."""
    nearest = None
    with suppress(OSError):
        nearest = nearest_of(path.name, [each.name for each in path.parent.iterdir()])
    hint = "" if nearest is None else f" (did you mean {path.with_name(nearest)}?)"
    return f"there is no file or folder {path}{hint}"


def _download(repository: str, revision: str | None, weights: bool) -> Path:
    """Return the folder of a repository's files in the cache of huggingface_hub."""
    problem = _not_there(Path(repository))
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError as error:
        raise ModelError(
            f"{problem}; to read the repository of that id from the Hugging Face Hub: {to_install(READER)}"
        ) from error
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(RUN_FILES if weights else CONFIG_FILES),
                ignore_patterns=list(LEFT_OUT),
            )
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"the repository {repository} is gated: ask for access at https://huggingface.co/{repository}, then run "
            "`hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{problem}, and no repository of that id on the Hugging Face Hub that you may read"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"the repository {repository} has no branch, tag or commit {revision}") from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face Hub cannot be reached"
        raise ModelError(
            f"{problem}, {why}, and {_needed(repository, revision, weights, constants.HF_HUB_CACHE)}"
        ) from error
    except Exception as error:  # a library's errors of any kind: of the connection, the disk, the id
        reason = safe_text(error).partition("\n")[0]
        raise ModelError(f"{problem}, and its repository cannot be downloaded: {shorten(reason)}") from error
    # Without a connection, a folder comes back that may hold only what an earlier command needed.
    if not (folder / "config.json").is_file() or (weights and not any(folder.glob("*.safetensors"))):
        raise ModelError(
            f"the repository {repository} has no {'safetensors and ' if weights else ''}config.json here: "
            f"{_needed(repository, revision, weights, constants.HF_HUB_CACHE)}"
        )
    return folder


def _needed(repository: str, revision: str | None, weights: bool, cache: str) -> str:
    """Return what makes a command work offline."""
    files = ("" if weights else " config.json") + ("" if revision is None else f" --revision {revision}")
    return (
        f"the cache {cache} lacks it: `hf download {repository}{files}` with a connection puts there what this command "
        "needs offline"
    )
