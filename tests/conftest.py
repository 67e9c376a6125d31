from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvframe.contract.errors import KVFrameError
from kvframe.loading.plugins import load_plugins
from tests.loading.fake_distributions import FakeSite

if TYPE_CHECKING:  # the tests of a backend's kernels run without transformers too
    from tests.models.serving import TinyModel, Tokens


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled(request: pytest.FixtureRequest) -> None:
    # Kernels that are compiled at first use report it on stderr: now, and not in the output that a test checks.
    if request.config.option.markexpr == "gpu":
        return  # they depend on the processor
    for name in (registry := load_plugins().registry).backends.names():
        with contextlib.suppress(KVFrameError):
            registry.backends.load(name).unusable_reason()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Make a tiny model of a family, once for all tests."""
    from tests.models.serving import TinyModel

    folder = tmp_path_factory.mktemp("models")
    return cache(lambda family: TinyModel.save(folder / family, family))


@pytest.fixture(scope="session")
def llama(models: Callable[[str], TinyModel]) -> TinyModel:
    """The tiny model of the simplest family."""
    return models("llama")


@pytest.fixture(scope="session")
def references(models: Callable[[str], TinyModel]) -> Callable[[str], Tokens]:
    """Return what transformers generates after each prompt with the tiny model of a family."""
    from tests.models.serving import PROMPTS

    return cache(lambda family: [models(family).reference(prompt) for prompt in PROMPTS])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """A folder on the path; importlib.metadata finds only its distributions."""
    find = MetadataPathFinder.find_distributions

    def find_here(context: Any = None) -> Iterable[Distribution]:
        name = None if context is None else context.name
        return find(DistributionFinder.Context(name=name, path=[str(tmp_path)]))

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(MetadataPathFinder, "find_distributions", staticmethod(find_here))
    fake = FakeSite(tmp_path)
    yield fake
    fake.forget_modules()
