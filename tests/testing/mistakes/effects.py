"""Backends that compute attention rightly, and change something for the rest of the process."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch

from kvframe.contract.backend import KVCache
from kvframe.contract.slots import Slots
from kvframe.contract.specs import LayerSpec
from tests.testing.mistakes.backend import RightBackend
from tests.testing.mistakes.kinds import kind


class _Effect(RightBackend):
    """Does something more."""

    def effect(self) -> None:
        pass

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **options: Any
    ) -> torch.Tensor:
        output = super().attend(layer, query, kv_cache, metadata, **options)
        self.effect()
        return output


@kind("it seeds torch's generator")
class _Seeds(_Effect):
    def effect(self) -> None:
        torch.manual_seed(0)


@kind("it draws from torch's generator")
class _Draws(_Effect):
    def effect(self) -> None:
        torch.rand(1)


@kind("it seeds Python's generator")
class _SeedsPython(_Effect):
    def effect(self) -> None:
        random.seed(0)


@kind("it seeds NumPy's generator")
class _SeedsNumpy(_Effect):
    def effect(self) -> None:
        np.random.seed(0)


@kind("it sets the default dtype")
class _DefaultDtype(_Effect):
    def effect(self) -> None:
        torch.set_default_dtype(torch.bfloat16)


@kind("it sets the number of threads")
class _Threads(_Effect):
    def effect(self) -> None:
        torch.set_num_threads(3)


@kind("it switches gradients off")
class _Gradients(_Effect):
    def effect(self) -> None:
        torch.set_grad_enabled(False)


@kind("it lets products be less precise")
class _Precision(_Effect):
    def effect(self) -> None:
        torch.set_float32_matmul_precision("medium")


@kind("it sets an environment variable", missed="libraries do so at their first use, and so does torch's compiler")
class _Environment(_Effect):
    def effect(self) -> None:
        os.environ["KVFRAME_MISTAKE"] = "1"


@kind("it seeds torch's generator when it is made")
class _SeedsAtSetUp(RightBackend):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        torch.manual_seed(1)


@kind("it sets the default dtype when it writes")
class _DtypeInWrite(RightBackend):
    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        super().write_kv(key, value, kv_cache, slots)
        torch.set_default_dtype(torch.float64)


@kind("it scales the learned sinks in place")
class _SinksInPlace(RightBackend):
    def attend(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        *,
        sinks: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        output = super().attend(layer, query, kv_cache, metadata, sinks=sinks, **options)
        if sinks is not None:
            sinks.mul_(1.5)
        return output


@kind("it changes the bound bias in place")
class _BiasInPlace(RightBackend):
    def bind(self, layer: LayerSpec, parameters: Any) -> None:
        super().bind(layer, parameters)
        for tensor in parameters.values():
            self.parameters[layer.name] = {**parameters, "relative_bias": tensor.clone()}
            tensor.zero_()


@kind("it keeps the tensors of every step", missed="the contract sets no limit to memory; a soak run measures it")
class _KeepsAll(RightBackend):
    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **options: Any
    ) -> torch.Tensor:
        vars(self).setdefault("all", []).append(query)
        return super().attend(layer, query, kv_cache, metadata, **options)


@kind("one call of a thousand is wrong at random", missed="no fixed number of cases finds what is rare")
class _Random(RightBackend):
    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **options: Any
    ) -> torch.Tensor:
        output = super().attend(layer, query, kv_cache, metadata, **options)
        return output * 0 if random.Random(id(output)).random() < 1e-3 else output
