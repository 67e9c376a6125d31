"""The names of ``kvframe-engine``, a package of its own, which ``kvframe`` gives too."""

from __future__ import annotations

import importlib
from typing import Any

from kvframe.contract.errors import PluginError
from kvframe.loading.packages import to_install

_PACKAGE = "kvframe_engine"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # Python asks a module for such names, which the engine does not have
        raise AttributeError(name)
    try:
        engine = importlib.import_module(_PACKAGE)
    except ModuleNotFoundError as error:
        if error.name != _PACKAGE:
            raise
        raise PluginError(
            f"kvframe.{name} is a part of kvframe-engine, which is not installed; try: {to_install('kvframe-engine')}"
        ) from error
    return getattr(engine, name)
