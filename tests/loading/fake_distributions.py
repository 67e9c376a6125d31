"""Fake distributions: real files that importlib.metadata reads, written without pip."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import attrs

MANIFEST = "from kvframe.contract.hookspecs import hookimpl\n"


def registers(hook: str, *claims: tuple[str, str]) -> str:
    """Return the source of a manifest that registers ``claims`` in ``kvframe_register_<hook>``."""
    lines = [f"    register({name!r}, {target!r})" for name, target in claims]
    return "\n".join([MANIFEST, "@hookimpl", f"def kvframe_register_{hook}(register):", "    ...", *lines, ""])


@attrs.frozen
class FakeSite:
    """A folder of fake distributions; ``root`` must be on the path."""

    root: Path

    def add(
        self,
        distribution: str,
        name: str,
        manifest: str = registers("backends"),
        *,
        api: str | None = "v1_0",
        group: str = "kvframe.v1",
        version: str = "0.1",
        files: Mapping[str, str] | None = None,
    ) -> str:
        """Install one plugin and return its manifest module's name.

        Args:
            distribution: Its distribution; several plugins may be added to one.
            name: Its entry point's name.
            manifest: The manifest's source.
            api: The contract version that it states; None for none.
            group: Its entry-point group.
            version: The distribution's version.
            files: Other modules of its package: name and source.
        """
        package = distribution.replace("-", "_")
        module = f"manifest_{name}"
        for file, source in {"__init__": "", module: manifest, **(files or {})}.items():
            path = self.root / package / f"{file}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(dedent(source))
        lines = [f"[{group}]", f"{name} = {package}.{module}"]
        if api is not None:
            lines += [f"[{group}.api]", f"{name} = {api}"]
        self.write_metadata(distribution, "\n".join(lines), version)
        return f"{package}.{module}"

    def write_metadata(self, distribution: str, entry_points: str, version: str = "0.1") -> None:
        """Write the distribution's metadata, or add entry points to it."""
        folder = self.root / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        with (folder / "entry_points.txt").open("a") as file:
            file.write(entry_points + "\n")
        importlib.invalidate_caches()

    def forget_modules(self) -> None:
        """Unload the modules of this folder, because the next test's files have the same names."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(self.root)):
                del sys.modules[name]
