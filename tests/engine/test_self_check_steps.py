"""The self-check at the start refuses a backend that is wrong in one kind of steps only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract.backend import KVCache
from kvframe.contract.errors import BackendError
from kvframe.contract.specs import LayerSpec
from kvframe.loading.plugins import load_plugins
from tests.models.serving import TinyModel
from tests.support.plugins import plugin


class WrongSteps(TorchReferenceBackend):
    """Returns zeros for steps of one kind."""

    def is_wrong(self, num_reqs: int, num_tokens: int) -> bool:
        raise NotImplementedError

    def attend(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, **named: Any
    ) -> torch.Tensor:
        output = super().attend(layer, query, kv_cache, metadata, **named)
        return output * 0 if self.is_wrong(metadata.num_reqs, metadata.num_actual_tokens) else output


class WrongAlone(WrongSteps):
    def is_wrong(self, num_reqs: int, num_tokens: int) -> bool:
        return num_reqs == 1


class WrongInDecodes(WrongSteps):
    def is_wrong(self, num_reqs: int, num_tokens: int) -> bool:
        return num_reqs == num_tokens > 1


class WrongInMixedBatches(WrongSteps):
    def is_wrong(self, num_reqs: int, num_tokens: int) -> bool:
        return num_tokens > num_reqs > 1


WRONG = {"alone": WrongAlone, "decodes": WrongInDecodes, "mixed": WrongInMixedBatches}


@pytest.mark.parametrize("name", WRONG)
def test_a_backend_that_is_wrong_in_one_kind_of_steps_is_refused(name: str, tmp_path: Path) -> None:
    model = TinyModel.save(tmp_path, "llama")
    model = attrs.evolve(model, registry=load_plugins(plugins=[plugin("mine", backends={name: WRONG[name]})]).registry)
    with pytest.raises(BackendError, match=rf"{name}' computes layer 'model\.layers\.0\.self_attn' wrongly"):
        model.engine(self_check=True, backend=name)
