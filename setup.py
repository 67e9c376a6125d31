"""The package index's page of the core: README.md, whose links and pictures are those of the repository."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def readme_of_the_index() -> str:
    """Return README.md with absolute addresses, because the index has no other files of the repository."""
    source = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?![a-z]+:)", rf"\1{source}/raw/main/", text)
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({source}/blob/main/", text)


setup(long_description=readme_of_the_index(), long_description_content_type="text/markdown")
