"""Finds the model adapter that reads a path, the layers of the model there, and the dtype that it runs in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from kvframe.config.options import MODEL_DTYPES
from kvframe.contract.description import ModelDescription, ModelShare
from kvframe.contract.errors import KVFrameError, ModelError, PluginError, nearest_of, shown
from kvframe.contract.files import reason_of
from kvframe.contract.foreign import call, safe_repr
from kvframe.loading.packages import to_install
from kvframe.planning.layer_file import LayerFiles, is_layer_file, parse_file

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.contract.model import LoadedModel, ModelAdapter, ModelInMemory
    from kvframe.loading.claims import Claim
    from kvframe.loading.registry import Registry

_log = logging.getLogger("kvframe")

AUTO = "auto"
"""The dtype of a stack that names none."""

DEFAULT_DTYPE = "float32"
"""The dtype of a model whose checkpoint names none."""

_CPU_FEATURES = {
    "bfloat16": ("amx_bf16", "avx512_bf16", "arm_bf16", "bf16"),
    "float16": ("amx_fp16", "avx512_fp16", "arm_fp16_arith", "fp16_arith"),
}
"""For each dtype of 16 bits, the features with which a CPU multiplies it; without one, it converts to float32."""


@attrs.frozen
class FoundAdapter:
    """Wraps a plugin's model adapter, so that its failures become errors that name it by the plugin's claim."""

    claim: Claim
    adapter: ModelAdapter

    @classmethod
    def make(cls, claim: Claim) -> FoundAdapter:
        """Import the adapter's class and make an instance; raise ``PluginError`` if either fails."""
        return cls(claim, call(f"model adapter {claim.id!r}: __init__()", claim.load()))

    @property
    def whose(self) -> str:
        """The adapter's name for errors."""
        return f"model adapter {self.claim.id!r}"

    def recognises(self, path: Path) -> bool:
        """Return whether the adapter can read ``path``; raise ``PluginError`` if it fails."""
        answer: Any = call(f"{self.whose}: recognises()", self.adapter.recognises, path)
        if type(answer) is not bool:
            raise PluginError(f"{self.whose}: recognises() must return True or False, not {safe_repr(answer)}")
        return answer

    def find(self, name: str, *, weights: bool) -> Path | None:
        """Return the folder of a model by its name, or None; raise ``KVFrameError`` if the adapter refuses or fails."""
        folder: Any = call(f"{self.whose}: find()", self.adapter.find, name, weights=weights, passes=(KVFrameError,))
        if folder is None or isinstance(folder, Path):
            return folder
        raise PluginError(f"{self.whose}: find() must return a Path or None, not {safe_repr(folder)}")

    def describe(self, path: Path) -> ModelDescription:
        """Return the description of the model at ``path``; raise ``KVFrameError`` if the adapter refuses or fails."""
        description: Any = call(f"{self.whose}: describe()", self.adapter.describe, path, passes=(KVFrameError,))
        return self._checked(description, "describe() must return a ModelDescription")

    def dtype_of(self, path: Path) -> str | None:
        """Return the dtype of the weights at ``path``, or None; raise ``KVFrameError`` if the adapter fails."""
        dtype: Any = call(f"{self.whose}: dtype_of()", self.adapter.dtype_of, path, passes=(KVFrameError,))
        if dtype is None or (isinstance(dtype, str) and dtype in MODEL_DTYPES):
            return dtype
        raise PluginError(
            f"{self.whose}: dtype_of() must return None or one of {', '.join(MODEL_DTYPES)}, not {safe_repr(dtype)}"
        )

    def share_of_rank(self, path: Path, description: ModelDescription, *, dtype: str, num_ranks: int) -> ModelShare:
        """Return what each of several ranks would hold; raise ``KVFrameError`` if the adapter refuses or fails."""
        ask = partial(self.adapter.share_of_rank, path, description, dtype=dtype, num_ranks=num_ranks)
        share: Any = call(f"{self.whose}: share_of_rank()", ask, passes=(KVFrameError,))
        if isinstance(share, ModelShare):
            return share
        raise PluginError(f"{self.whose}: share_of_rank() must return a ModelShare, not {safe_repr(share)}")

    def load(self, path: Path, *, device: str, dtype: str, whole: bool = False) -> LoadedModel:
        """Return the loaded model; raise ``KVFrameError`` if the adapter refuses or fails.

        ``whole`` says whether this process alone runs the model, if there are several.
        """
        name = "load_whole" if whole else "load"
        question, load = f"{self.whose}: {name}()", getattr(self.adapter, name)
        model: LoadedModel = call(question, load, path, device=device, dtype=dtype, passes=(KVFrameError,))
        description = call(question, getattr, model, "description", None)
        self._checked(description, f"{name}() must return a model with a description")
        return model

    def adopt(self, model: Any, tokenizer: Any) -> ModelInMemory | None:
        """Return a model in memory that the adapter knows, or None; raise ``KVFrameError`` if it refuses or fails."""
        question = f"{self.whose}: adopt()"
        adopted_model: Any = call(question, self.adapter.adopt, model, tokenizer, passes=(KVFrameError,))
        if adopted_model is None:
            return None
        self._checked(
            call(question, lambda: adopted_model.model.description),
            "adopt() must return None or a ModelInMemory with a description",
        )
        return adopted_model  # type: ignore[no-any-return]

    def _checked(self, description: Any, demand: str) -> ModelDescription:
        if not isinstance(description, ModelDescription):
            raise PluginError(f"{self.whose}: {demand}, not {safe_repr(description)}")
        return description


def find_model(model: Path | str, *, weights: bool, registry: Registry | None = None) -> Path:
    """Return the path of a model: its own, or the folder that a model adapter finds by the name ``owner/name``.

    An adapter may download what is missing. That of ``kvframe-transformers`` knows the repositories of the Hugging Face
    Hub, by ``owner/name`` or ``owner/name@revision``.

    Args:
        model: A path; or a name, if there is no such file or folder.
        weights: Whether the model will run; otherwise only its config is needed.
        registry: Where model adapters are looked up; the installed plugins' unless given.

    Raises:
        ModelError: There is no such path, and no adapter finds a model by that name.
    """
    path = Path(model)
    if _exists(path):
        return path
    sentences = [_not_there(path)]
    from kvframe.loading.plugins import load_plugins  # here, so that help of the command line loads no plugins

    is_name = len(Path(str(path).partition("@")[0]).parts) == 2 and not path.is_absolute()
    if is_name:
        adapters = (load_plugins().registry if registry is None else registry).model_adapters
        for name in adapters.names():
            try:
                folder = FoundAdapter.make(adapters.get(name)).find(str(path), weights=weights)
            except KVFrameError as error:
                sentences.append(str(error))
            else:
                if folder is not None:
                    return folder
        if not adapters.names():
            sentences.append(f"to read a repository of the Hugging Face Hub: {to_install('kvframe-transformers')}")
    raise ModelError("; ".join(sentences))


def _not_there(path: Path) -> str:
    """Return that a path does not exist, with the name in its folder that is most like its own."""
    nearest = None
    with suppress(OSError):
        nearest = nearest_of(path.name, [entry.name for entry in path.parent.iterdir()])
    hint = "" if nearest is None else f" (did you mean {path.with_name(nearest)}?)"
    return f"there is no file or folder {path}{hint}"


def _exists(path: Path) -> bool:
    """Return whether a path exists; raise ``ModelError`` if it cannot be a path, for example if it is too long."""
    try:
        return path.exists()
    except (OSError, ValueError) as error:
        raise ModelError(f"the model {shown(str(path))} cannot be read: {reason_of(error)}") from error


def find_adapter(path: Path, registry: Registry) -> FoundAdapter:
    """Return the one model adapter that recognises ``path``; adapters that fail are ignored.

    Raises:
        ModelError: The path does not exist, or no adapter or more than one recognises it.
    """
    if not _exists(path):
        raise ModelError(f"there is no file or folder {path}")
    adapters: dict[str, FoundAdapter] = {}
    problems: list[str] = []
    names = registry.model_adapters.names()
    for name in names:
        try:
            adapter = FoundAdapter.make(registry.model_adapters.get(name))
            if adapter.recognises(path):
                adapters[name] = adapter
        except PluginError as error:
            problems.append(str(error))
    if len(adapters) == 1:
        return adapters.popitem()[1]
    if adapters:
        raise ModelError(
            f"{path} is recognised by more than one model adapter ({', '.join(adapters)}); "
            "disable the plugin that is not meant, in the stack's [plugins] disabled"
        )
    if not names:
        raise ModelError(
            f"no plugin that reads models is in use, so {path} cannot be read; `kvframe plugins` shows what is "
            f"installed, `{to_install('kvframe-transformers')}` adds one for Hugging Face models"
        )
    config = path / "config.json"
    if config.is_file():
        parse_file(config)  # raises for invalid JSON, which is why no adapter recognised the folder
    sentence = f"{path} is no model that a plugin recognises (asked: {', '.join(names)})"
    raise ModelError("; ".join([sentence, *problems, "a Hugging Face model is a folder with a config.json"]))


def adopt_model(model: Any, tokenizer: Any, registry: Registry) -> ModelInMemory:
    """Return a model that is in memory already, as the one adapter that knows it takes it.

    Raises ``ModelError`` if no adapter or more than one knows it, or the one that knows it cannot serve it.
    """
    names = registry.model_adapters.names()
    answers = {name: FoundAdapter.make(registry.model_adapters.get(name)).adopt(model, tokenizer) for name in names}
    models = [answer for answer in answers.values() if answer is not None]
    if len(models) == 1:
        return models[0]
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if models:
        adapter_names = ", ".join(name for name, answer in answers.items() if answer is not None)
        raise ModelError(
            f"a {kind} is known to more than one model adapter ({adapter_names}); "
            "disable the plugin that is not meant, in the stack's [plugins] disabled"
        )
    raise ModelError(
        f"no plugin serves a {kind} in memory (asked: {', '.join(names) or 'none'}); give a model of transformers, "
        "or the inner one of a wrapped model, such as `model.module`"
    )


def describe(path: str | Path, *, plugins: Sequence[ModuleType] = ()) -> ModelDescription:
    """Return what a model's layers are, without its weights: names, types and options.

    Args:
        path: A model's folder or config file, or a layer file.
        plugins: Manifest modules to use beside the installed plugins.

    Raises:
        ModelError: The path does not exist, is not a model, or is a model that no plugin can describe.
        PluginError: The adapter that recognises it fails.
    """
    from kvframe.loading.plugins import load_plugins

    return describe_model(Path(path), load_plugins(plugins=plugins).registry)


def describe_model(path: Path, registry: Registry) -> ModelDescription:
    """Read a model's layers without its weights, from a layer file or by the adapter that recognises ``path``."""
    return find_reader(path, registry).describe(path)


def find_reader(path: Path, registry: Registry) -> FoundAdapter | LayerFiles:
    """Return what reads ``path``: the reader of layer files, or the adapter that ``find_adapter`` returns."""
    return LayerFiles() if is_layer_file(path) else find_adapter(path, registry)


def with_dtype(stack: Stack, path: Path, reader: FoundAdapter | LayerFiles, *, runs_here: bool = True) -> Stack:
    """Return a stack that names a dtype: its own, otherwise that of the checkpoint or layer file.

    A CPU that cannot multiply a dtype of 16 bits computes it more slowly than float32. On such a CPU, a model that
    ``runs_here``, and is not planned for another machine, gets float32.
    """
    if stack.model.dtype != AUTO:
        return stack
    dtype = reader.dtype_of(path) or DEFAULT_DTYPE
    if runs_here and stack.model.device.partition(":")[0] == "cpu" and not cpu_multiplies(dtype):
        _log.info(
            '%s is in %s, which this CPU computes more slowly than float32: it runs in float32; dtype = "%s" in the '
            "stack's [model] keeps its dtype",
            path.name,
            dtype,
            dtype,
        )
        dtype = "float32"
    return attrs.evolve(stack, model=attrs.evolve(stack.model, dtype=dtype))


def cpu_multiplies(dtype: str) -> bool:
    """Return whether this machine's CPU computes a dtype without converting it to a longer one."""
    if dtype not in _CPU_FEATURES:
        return True
    import torch

    features: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(features.get(name) for name in _CPU_FEATURES[dtype])
