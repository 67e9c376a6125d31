"""A model's last layers compute only the kept rows: which layers can do so, and which models are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.compiled import CompiledBody
from kvframe_transformers.model import TransformersModel
from kvframe_transformers.routing import RunningStep, running
from kvframe_transformers.skipping import RowCutter, blocks_from
from kvframe_transformers.testing import save_tiny
from torch import nn

from kvframe.contract import ModelError

FAMILIES = ("gemma3n_text", "gemma4_text")
SKIPPED = ("model.layers.4.self_attn", "model.layers.5.self_attn")
BATCH = {0: list(range(9)), 1: list(range(40, 64)), 2: [7]}
NUM_ROWS = 34


def load(path: Path, family: str, **overrides: Any) -> TransformersModel:
    save_tiny(path, family, **overrides)
    model = TransformersAdapter().load(path, device="cpu", dtype="float32")
    assert isinstance(model, TransformersModel)
    return model


def attached(model: TransformersModel, dense_layers: Any, skipped: Sequence[str] = SKIPPED) -> Any:
    layers = dense_layers(model.description.layers)
    layers.skipped = tuple(skipped)
    model.attach(layers)
    return layers


# --- the output for kept rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kept_rows",
    [
        [8, 32, 33],
        pytest.param([33], marks=pytest.mark.whole),
        pytest.param([0], marks=pytest.mark.whole),
        pytest.param([5, 6, 7, 8, 33], marks=pytest.mark.whole),
        pytest.param([8, 32, 33, 33, 33, 33], marks=pytest.mark.whole),
        [8, 32, *[33] * 32],  # as many as the tokens
        pytest.param([*range(NUM_ROWS)], marks=pytest.mark.whole),
        [*range(NUM_ROWS), 33, 33],
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_kept_rows_have_the_logits_of_a_step_with_all(
    family: str, kept_rows: list[int], tmp_path: Path, dense_layers: Any
) -> None:
    model = load(tmp_path, family)
    expected = attached(model, dense_layers).run_batch(model, BATCH)[kept_rows]
    model.detach()
    logits = attached(model, dense_layers).run_batch(model, BATCH, kept_rows)
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_later_steps_read_what_skipped_layers_never_computed(family: str, tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, family)
    layers = attached(model, dense_layers)
    layers.run_batch(model, BATCH)
    expected = layers.run_batch(model, {0: [3], 1: [4, 5, 6], 2: [8]})
    model.detach()
    layers = attached(model, dense_layers)
    layers.run_batch(model, BATCH, [33])
    logits = layers.run_batch(model, {0: [3], 1: [4, 5, 6], 2: [8]}, [0, 3, 4])
    torch.testing.assert_close(logits, expected[[0, 3, 4]], rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_in_the_skipped_blocks_sees_only_kept_rows(family: str, tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, family)
    layers = attached(model, dense_layers)
    shapes: set[torch.Size] = set()
    for block in model.model.model.layers[4:]:
        for module in block.modules():
            module.register_forward_hook(
                lambda module, args, kwargs, out: shapes.update(
                    x.shape for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)
                ),
                with_kwargs=True,
            )
    layers.run_batch(model, BATCH, [8, 32, 33])
    assert any(3 in shape for shape in shapes)
    assert set() == {shape for shape in shapes if NUM_ROWS in shape}


@pytest.mark.parametrize("family", FAMILIES)
def test_skipped_layers_have_no_projection_of_keys_or_values(family: str, tmp_path: Path) -> None:
    """In these families, a layer that reads another layer's cache has no cache, so none can run."""
    paths = [path for path, _ in load(tmp_path, family).model.named_modules() if path.startswith(SKIPPED)]
    assert f"{SKIPPED[0]}.q_proj" in paths
    assert not [path for path in paths if path.endswith(("k_proj", "v_proj", "k_norm", "v_norm"))]


@pytest.mark.whole  # torch traces the layers for half a minute
@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text"])
def test_compiled_steps_have_the_logits_of_the_kept_rows(family: str, tmp_path: Path, dense_layers: Any) -> None:
    steps: list[tuple[dict[int, list[int]], list[int] | None]] = [
        (BATCH, [8, 32, 33]),
        ({0: [3], 1: [4, 5, 6], 2: [8]}, [0, 3, 4]),
        ({0: [1, 2, 3]}, [2]),
        ({1: [1, 2, 3]}, [1, 2, 2]),  # as many as the tokens
        ({2: [5, 6]}, None),
        ({0: [4]}, [0]),
    ]
    model = load(tmp_path, family)
    layers = attached(model, dense_layers)
    expected = [layers.run_batch(model, *step) for step in steps]
    model.detach()
    layers = attached(model, dense_layers)
    model.compile("eager")
    assert model.compiled is not None
    num_rows: set[int] = set()
    model.compiled.keeping = counting(model.compiled.keeping, num_rows)  # type: ignore[method-assign]
    for expected_logits, step in zip(expected, steps, strict=True):
        torch.testing.assert_close(layers.run_batch(model, *step), expected_logits, rtol=0, atol=2e-4)
    assert ({1, 3}, 0) == (num_rows, model.compiled.num_graph_breaks)


class Unchained(nn.Module):
    """Blocks that do not get the very output of the block before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        first, second = self.blocks
        output: torch.Tensor = second(first(input_ids).clone())
        return output


def test_compiled_blocks_that_are_not_chained_compute_and_refuse_what_others_do() -> None:
    body, rows = Unchained(), torch.randn(1, 5, 4)
    expected = body(rows)
    cutter = RowCutter(tuple(body.blocks))
    compiled = CompiledBody(body, {}, "eager", cutter)

    def run(row_indices: list[int]) -> torch.Tensor:
        kept_rows = torch.tensor(row_indices)
        with torch.inference_mode(), running(RunningStep({}, torch.arange(5), kept_rows)):
            output: torch.Tensor = compiled.keeping(kept_rows)(input_ids=rows)
            return output

    for row_indices in ([1, 4], [3], [0, 2, 3]):
        torch.testing.assert_close(run(row_indices), expected[:, row_indices])
    # Such code serves any number of rows, so it returns to Python, which sees whether this step's can be distinguished.
    compiled.note_probe()
    assert compiled.num_graph_breaks > 0
    with pytest.raises(ModelError, match="Linear does not get the output of the block before it"):
        run([0, 1, 4, 4, 4])


def counting(keeping: Callable[..., Any], num_rows: set[int]) -> Callable[..., Any]:
    def counted(kept_rows: torch.Tensor) -> Any:
        num_rows.add(len(kept_rows))
        return keeping(kept_rows)

    return counted


# --- attaching and detaching ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_detaching_leaves_no_hook_and_the_very_logits(family: str, tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, family)
    tokens = torch.arange(12)[None]
    with torch.inference_mode():
        before = model.model(tokens).logits
    layers = attached(model, dense_layers)
    layers.run_batch(model, BATCH, [8, 32, 33])
    model.detach()
    assert [] == [m for m in model.model.modules() if m._forward_hooks or m._forward_pre_hooks]
    with torch.inference_mode():
        assert torch.equal(before, model.model(tokens).logits)


def test_a_model_whose_layers_skip_nothing_gets_no_hook(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "gemma3n_text")
    attached(model, dense_layers, ())
    assert [] == [m for m in model.model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_layers_that_cannot_be_skipped_are_refused(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "gemma3n_text")
    with pytest.raises(ModelError, match=r"cannot leave rows out from layer 'model.layers.4.self_attn' on"):
        attached(model, dense_layers, SKIPPED[:1])
    assert [] == [m for m in model.model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_a_model_that_needs_all_rows_behind_its_layers_is_refused(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "gemma4_text")
    embeddings: list[torch.Tensor] = []
    model.model.model.embed_tokens.register_forward_hook(lambda module, args, out: embeddings.append(out))
    model.model.model.norm.register_forward_pre_hook(lambda module, args: (args[0] + embeddings[-1],))
    with pytest.raises(ModelError, match="it gave 3 logits in a step of three tokens that keeps one"):
        attached(model, dense_layers)


def test_blocks_that_are_not_chained_are_refused_where_padding_makes_rows_as_many_as_tokens(
    tmp_path: Path, dense_layers: Any
) -> None:
    model = load(tmp_path, "gemma4_text")
    layers = attached(model, dense_layers)
    model.model.model.layers[4].register_forward_hook(lambda module, args, out: out.clone())
    layers.run_batch(model, {0: [1, 2, 3]}, [2])
    layers.run_batch(model, {0: [4]}, [0])
    with pytest.raises(ModelError, match="Gemma4TextDecoderLayer does not get the output of the block before it"):
        layers.run_batch(model, {1: [1, 2, 3]}, [1, 2, 2])


# --- the self-check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_accepts_it(family: str, tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, family)
    model.self_check(partial(attached(model, dense_layers).run_packed, model))


def test_the_self_check_refuses_a_block_that_looks_at_other_tokens(tmp_path: Path, dense_layers: Any) -> None:
    model = load(tmp_path, "gemma3n_text")
    # Its output for the last two tokens differs from its output in a run of all rows.
    model.model.model.layers[5].mlp.register_forward_hook(lambda module, args, out: -out if out.shape[1] == 2 else out)
    with pytest.raises(ModelError, match=r"its layers from 'model.layers.4.self_attn' on compute only the last tokens"):
        model.self_check(partial(attached(model, dense_layers).run_packed, model))


# --- which layers can be skipped --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trailing_layers_can_be_skipped(family: str, tmp_path: Path) -> None:
    model = load(tmp_path, family)
    assert [True, True] == [model.can_skip(SKIPPED), model.can_skip(SKIPPED[1:])]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_before_one_that_computes_all_rows_cannot(family: str, tmp_path: Path) -> None:
    model = load(tmp_path, family)
    assert [False, False, False] == [
        model.can_skip(names) for names in (SKIPPED[:1], ("model.layers.3.self_attn", SKIPPED[1]), ())
    ]


class Block(nn.Module):
    """A block with one attention, or with two as a decoder over an encoder has them."""

    def __init__(self, num_attentions: int = 1) -> None:
        super().__init__()
        self.attention = nn.Identity() if num_attentions == 1 else nn.ModuleList([nn.Identity(), nn.Identity()])


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.last = Block()


def test_blocks_behind_the_first_skipped_one_are_cut_with_or_without_attention() -> None:
    model = Stack(Block(), Block(), nn.Linear(2, 2), Block())
    attention = ["blocks.0.attention", "blocks.1.attention", "blocks.3.attention"]
    assert tuple(model.blocks)[1:] == blocks_from(model, attention, attention[1:])


def test_an_attention_layer_outside_of_a_list_of_blocks_cannot_be_skipped() -> None:
    model = Stack(Block(), Block())
    attention = ["blocks.0.attention", "blocks.1.attention", "last.attention"]
    assert blocks_from(model, attention, attention[2:]) is None
    assert blocks_from(model, attention, attention[1:]) is None


def test_a_block_that_also_holds_a_layer_of_all_rows_cannot_be_skipped() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.cross = nn.Identity(), nn.Identity()

    model = Stack(Decoder(), Decoder())
    attention = ["blocks.0.own", "blocks.0.cross", "blocks.1.own", "blocks.1.cross"]
    assert blocks_from(model, attention, attention[3:]) is None
    assert tuple(model.blocks)[1:] == blocks_from(model, attention, attention[2:])


def test_layers_of_different_lists_cannot_be_skipped_together() -> None:
    model = nn.ModuleDict({"a": Stack(Block()), "b": Stack(Block())})
    attention = ["a.blocks.0.attention", "b.blocks.0.attention"]
    assert blocks_from(model, attention, attention) is None


def test_temperatures_and_complex_rotations_are_those_of_the_kept_rows(tmp_path: Path, dense_layers: Any) -> None:
    """No family shares caches and has such blocks; here Llama 4's last two layers read the caches of its first two."""
    model = load(tmp_path, "llama4_text")
    own, (chunked, full) = model.description.layers[:2], model.description.layers[2:]
    sharing = (attrs.evolve(chunked, shares_with=own[0].name), attrs.evolve(full, shares_with=own[1].name))
    model.description = attrs.evolve(model.description, layers=(*own, *sharing))
    expected = attached(model, dense_layers, ()).run_batch(model, BATCH)
    model.detach()
    layers = attached(model, dense_layers, [layer.name for layer in sharing])
    logits = layers.run_batch(model, BATCH, [8, 32, 33])
    torch.testing.assert_close(logits, expected[[8, 32, 33]], rtol=0, atol=2e-4)
