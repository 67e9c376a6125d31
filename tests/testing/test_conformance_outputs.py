"""The conformance kit always checks something: it examines what ``attend`` returns, and zero cases are an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from kvframe_testing import composition
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_cases, make_layer
from kvframe_testing.laws import ConformanceError
from kvframe_testing.sample import sample
from kvframe_torch.backend import TorchBackend
from kvframe_torch.builder import TorchMetadataBuilder

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import BackendError
from kvframe.loading.plugins import load_plugins
from tests.testing import composition as matrix

CAPABILITIES = TorchBackend.capabilities
(CASE,) = make_cases(CAPABILITIES, formats=(), only="full-block=16-mixed")


class AnotherTensor(torch.Tensor):
    pass


def returning(change: Callable[[torch.Tensor], object], base: type[AttentionBackend]) -> type[AttentionBackend]:
    def attend(self: AttentionBackend, *args: Any, **options: Any) -> object:
        return change(base.attend(self, *args, **options))

    return type("Returns", (base,), {"attend": attend})


# One builds metadata that are refreshed, the other asks for an order of requests.
@pytest.mark.parametrize("base", [TorchBackend, TorchReferenceBackend])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda output: None, "attend returns NoneType, not torch.Tensor"),
        (lambda output: (output, None), "attend returns tuple, not torch.Tensor"),
        (lambda output: [*output], "attend returns list, not torch.Tensor"),
        (lambda output: output.numpy(), "attend returns ndarray, not torch.Tensor"),
        (lambda output: output.as_subclass(AnotherTensor), "attend returns AnotherTensor, not torch.Tensor"),
        (
            lambda output: output.double(),
            r"the output is .*torch.float64, cpu, not \(29, 4, 8\), torch.float32",
        ),
        (lambda output: output.half(), r"the output is \(29, 4, 8\), torch.float16, cpu, not"),
        (lambda output: output.flatten(1), r"the output is \(29, 32\), torch.float32, cpu, not"),
        (lambda output: output[:-1], r"the output is \(28, 4, 8\), torch.float32, cpu, not"),
        (lambda output: output.to("meta"), r"the output is \(29, 4, 8\), torch.float32, meta, not .*, cpu$"),
        (lambda output: output.to_sparse(), r"the output is .*cpu, torch.sparse_coo, not .*cpu$"),
    ],
)
def test_anything_but_a_tensor_as_the_contract_says_is_a_failure(
    change: Callable[[torch.Tensor], object], message: str, base: type[AttentionBackend]
) -> None:
    with pytest.raises(ConformanceError, match=f"^Returns on full-block=16-mixed: {message}"):
        check_backend(returning(change, base), CASE)


def test_an_output_from_refreshed_metadata_is_looked_at_as_every_other() -> None:
    class ThirdTimeNothing(TorchBackend):
        num_calls = 0

        def attend(self, *args: Any, **options: Any) -> Any:
            self.num_calls += 1
            return super().attend(*args, **options) if self.num_calls <= 2 else None

    assert TorchMetadataBuilder.table_fields
    with pytest.raises(ConformanceError, match="mixed: with refreshed metadata, attend returns NoneType"):
        check_backend(ThirdTimeNothing, CASE)


# --- zero cases -------------------------------------------------------------------------------------------------------


def test_capabilities_that_lead_to_no_case_are_an_error_that_says_why() -> None:
    with pytest.raises(BackendError, match="did you mean 'causal'"):
        attrs.evolve(CAPABILITIES, masks=frozenset({"casual"}))
    elsewhere = attrs.evolve(CAPABILITIES, devices=frozenset({"xpu"}))
    with pytest.raises(ConformanceError, match=r"no case at all: .* on cpu: it runs on xpu, not on cpu"):
        make_cases(elsewhere)
    with pytest.raises(ConformanceError, match=r"no case at all: .*it has no mask causal \(window\)"):
        make_cases(attrs.evolve(CAPABILITIES, masks=frozenset({"window"})), formats=())
    with pytest.raises(ConformanceError, match=r"no case at all: .*it reads the state tensors latent, not k, v"):
        make_cases(attrs.evolve(CAPABILITIES, state=frozenset({"latent"})), formats=())


def test_a_name_that_no_case_has_is_an_error() -> None:
    with pytest.raises(ConformanceError, match=r"no case has a name like 'ful-"):
        make_cases(CAPABILITIES, formats=(), only="ful-*")


def test_a_chain_that_no_layer_can_follow_is_an_error() -> None:
    chunked = load_plugins().registry.wrappers.load("chunked_local")()
    with pytest.raises(ConformanceError, match=r"no case after chunked_local[+]chunked_local"):
        make_cases(CAPABILITIES, chains=[(chunked, chunked)], formats=())


def test_a_format_that_no_layer_is_stored_in_is_an_error() -> None:
    int4 = load_plugins().registry.formats.load("int4_token_head")()
    with pytest.raises(ConformanceError, match="no case in the format int4_token_head"):
        make_cases(attrs.evolve(CAPABILITIES, head_sizes=frozenset({7})), formats=[int4])


def test_a_size_of_a_field_that_no_layer_has_is_an_error() -> None:
    with pytest.raises(ConformanceError, match="names latent_sise, which GridSpec lacks"):
        make_layer(attrs.evolve(CAPABILITIES, spec_sizes={"latent_sise": {512}}))


def test_a_sample_or_a_part_of_no_case_is_an_error() -> None:
    with pytest.raises(ConformanceError, match="there is no case"):
        sample([])


def test_a_backend_that_computes_nothing_or_raises_is_wrong_in_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nowhere(TorchReferenceBackend):
        capabilities = attrs.evolve(CAPABILITIES, masks=frozenset({"window"}))

    class Raises(TorchReferenceBackend):
        def attend(self, *args: Any, **options: Any) -> Any:
            raise ZeroDivisionError("by zero")

    monkeypatch.setattr(matrix, "MAX_CHAIN", 0)
    monkeypatch.setattr(composition, "LAYERS", {"full": lambda block_size: {}})
    registry = load_plugins().registry
    backends = {"nowhere": Nowhere, "raises": Raises, "nothing": returning(lambda output: None, TorchReferenceBackend)}
    monkeypatch.setattr(registry.backends, "names", lambda: (*backends,))
    monkeypatch.setattr(registry.backends, "load", backends.__getitem__)
    wrong = {cell.backend: (cell.verdict, cell.detail) for cell in matrix.compose(registry) if cell.layer == "full"}
    assert dict.fromkeys(backends, matrix.WRONG) == {name: verdict for name, (verdict, _) in wrong.items()}
    assert (
        "Nowhere serves no layer at all on cpu, so that nothing of it was computed: mask_causal" == wrong["nowhere"][1]
    )
    assert "Raises on full: ZeroDivisionError: by zero" == wrong["raises"][1]
    assert "Returns on full: mixed: attend returns NoneType, not torch.Tensor" == wrong["nothing"][1]
