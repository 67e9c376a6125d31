from __future__ import annotations

import contextlib
import re
import sys
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


@pytest.fixture(scope="module", autouse=True)
def _layers_of_a_config_are_discovered_once() -> Iterator[None]:
    # Discovery runs the model without weights, which takes longer than to load a tiny model. The plugin's own tests
    # discover the layers each time.
    adapter: Any = sys.modules.get("kvframe_transformers.adapter")
    if adapter is None:
        yield
        return
    discover = adapter.discover_layers

    def discover_once(model: Any, name: str, max_model_len: int, *, generates: bool = True, values: Any = None) -> Any:
        config = re.sub(r'"_name_or_path": "[^"]*"', "", model.config.to_json_string(use_diff=False))
        key = type(model), config, max_model_len, generates, values is None
        if key not in DISCOVERED:
            DISCOVERED[key] = discover(model, name, max_model_len, generates=generates, values=values)
        return DISCOVERED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "discover_layers", discover_once)
        yield


DISCOVERED: dict[tuple[Any, ...], Any] = {}
"""The layers of each model."""


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
