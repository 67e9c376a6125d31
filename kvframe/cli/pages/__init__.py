"""Pages: one self-contained HTML file each, which loads nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvframe.contract.errors import FileError
from kvframe.contract.foreign import safe_text

_DATA = "/*data*/"
_BEGINNING = b"<!doctype html>"


def write_page(path: Path, template: str, data: Mapping[str, Any], *, package: str = __name__) -> None:
    """Write a page with its data inside; raise ``FileError`` if another file is there, such as a model's."""
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    page = files(package).joinpath(template).read_text(encoding="utf-8")
    # Data may hold a model's names: nothing in them may end the script element.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    page = page.replace("/*style*/", style).replace(_DATA, text)
    try:
        if path.exists() and not path.read_bytes().startswith(_BEGINNING):
            raise FileError(f"the file {path} exists and is not a page; name another file")
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise FileError(f"the page {path} cannot be written: {safe_text(error)}") from error
