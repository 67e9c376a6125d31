"""Finds models on the Hugging Face Hub by the ids of their repositories (``Qwen/Qwen3-0.6B``).

A branch, tag or commit may follow: ``Qwen/Qwen3-0.6B@main``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kvframe.contract.errors import ModelError, shorten
from kvframe.contract.foreign import safe_text

_REPOSITORY = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.ASCII
)

CONFIG_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json")
"""What a plan reads of a repository."""

RUN_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""What a run reads of a repository: configs, weights and the tokenizer; never pickled files."""

LEFT_OUT = ("*/*.safetensors", "consolidated*")
"""Weights that repositories hold again in another form."""


def find_repository(name: str, *, weights: bool) -> Path | None:
    """Return the folder of a repository's files in the cache of huggingface_hub; None if a name is no id.

    Args:
        name: ``owner/name``, or ``owner/name@revision``.
        weights: Whether the model will run; otherwise only its config is downloaded.

    Raises:
        ModelError: There is no such repository, or it cannot be downloaded.
    """
    match = _REPOSITORY.fullmatch(name)
    return None if match is None else _download(match["id"], match["revision"], weights)


def _download(repository: str, revision: str | None, weights: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import constants, errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

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
        raise ModelError("there is no repository of that id on the Hugging Face Hub that you may read") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"the repository {repository} has no branch, tag or commit {revision}") from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face Hub cannot be reached"
        raise ModelError(f"{why}, and {_needed(repository, revision, weights, constants.HF_HUB_CACHE)}") from error
    except Exception as error:  # a library's errors of any kind: of the connection, the disk, the id
        reason = safe_text(error).partition("\n")[0]
        raise ModelError(f"the repository of that id cannot be downloaded: {shorten(reason)}") from error
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
