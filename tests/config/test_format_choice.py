"""From a format's name in a stack, a rule or a layer file to the planned layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner
from kvframe_kv_formats import Fp8Tensor, Int4TokenHead, Int8TokenHead

from kvframe.cli import main
from kvframe.config.stack import Stack
from kvframe.contract.description import LayerDescription, ModelDescription
from kvframe.contract.errors import KVFrameError, SpecError, StackError
from kvframe.contract.formats import PLAIN, StateTensor
from kvframe.contract.specs import KVCacheSpec, LayerSpec, TokenRange
from kvframe.loading.plugins import load_plugins
from kvframe.planning.groups import group_layers
from kvframe.planning.layer_specs import make_layer_specs
from kvframe.planning.plan import plan_cache
from tests.support.commands import run
from tests.support.plugins import plugin

SIZES = {"num_kv_heads": 2, "head_size": 8}


def described(**fields: Any) -> LayerDescription:
    return LayerDescription(query={"num_heads": 2, "head_size": 8, "scale": 1.0}, **fields)


def layers_of(data: dict[str, Any], *layers: LayerDescription) -> tuple[LayerSpec, ...]:
    """Return a model's layers under a stack; a layer with full attention and one with a window unless given."""
    stack = Stack.from_mapping(data)
    registry = load_plugins(stack.plugins).registry
    stack.check(registry)
    given = layers or (
        described(name="full", kind="full_attention", options=SIZES),
        described(name="window", kind="sliding_window", options={**SIZES, "window": 8}),
    )
    description = ModelDescription(name="model", layers=given, max_model_len=64)
    return make_layer_specs(description, registry, stack, "bfloat16")


def formats(layers: tuple[LayerSpec, ...]) -> list[Any]:
    return [layer.spec and layer.spec.kv_format for layer in layers]


def refusal(data: dict[str, Any], *layers: LayerDescription) -> str:
    with pytest.raises(KVFrameError) as caught:
        layers_of(data, *layers)
    assert type(caught.value) in (StackError, SpecError)
    return str(caught.value)


# --- where a format is chosen -----------------------------------------------------------------------------------------


def test_all_layers_are_stored_as_the_stack_says() -> None:
    assert [PLAIN, PLAIN] == formats(layers_of({}))
    assert [Int8TokenHead()] * 2 == formats(layers_of({"cache": {"format": "int8_token_head"}}))


def test_plain_is_a_format_that_needs_no_plugin() -> None:
    data = {"cache": {"format": "plain"}, "plugins": {"disabled": ["kv_formats"]}}
    assert [PLAIN, PLAIN] == formats(layers_of(data))


def test_a_table_gives_a_format_its_options() -> None:
    data = {"cache": {"format": {"name": "fp8_tensor", "k_scale": 2}}}
    assert [Fp8Tensor(k_scale=2.0)] * 2 == formats(layers_of(data))


def test_a_rule_stands_above_the_stack_and_above_the_layer() -> None:
    rule = {"kind": "full_attention", "spec": {"format": {"name": "fp8_tensor", "v_scale": 0.5}}}
    assert [Fp8Tensor(v_scale=0.5), Int4TokenHead()] == formats(
        layers_of({"cache": {"format": "int4_token_head"}, "rules": [rule]})
    )
    plain = {"kind": "full_attention", "spec": {"format": "plain"}}
    assert [PLAIN, Int4TokenHead()] == formats(layers_of({"cache": {"format": "int4_token_head"}, "rules": [plain]}))
    own = described(name="own", kind="full_attention", options={**SIZES, "format": "int8_token_head"})
    assert [Int8TokenHead()] == formats(layers_of({"cache": {"format": "int4_token_head"}}, own))
    assert [PLAIN] == formats(layers_of({"rules": [plain]}, own))


def test_a_layer_that_shares_a_cache_has_its_owners_format() -> None:
    owner = described(name="owner", kind="full_attention", options=SIZES)
    middle = described(name="middle", kind="full_attention", options=SIZES, shares_with="owner")
    last = described(name="last", kind="full_attention", options=SIZES, shares_with="middle")
    rule = {"layers": "owner", "spec": {"format": "plain"}}
    layers = layers_of({"cache": {"format": "int8_token_head"}, "rules": [rule]}, owner, middle, last)
    assert [PLAIN, PLAIN, PLAIN] == formats(layers)
    contrary = {"layers": "last", "spec": {"format": "int4_token_head"}}
    with pytest.raises(SpecError, match="'last' shares the cache of 'owner', which stores other tensors"):
        group_layers(layers_of({"rules": [contrary]}, owner, middle, last))


def test_a_format_does_not_change_layers_without_keys_and_values() -> None:
    latents = described(name="latents", kind="mla", options={"latent_size": 8, "rope_size": 4, "head_size_v": 8})
    encoder = described(name="encoder", kind="encoder_only", options=SIZES)
    data = {"cache": {"format": "int8_token_head"}}
    assert [PLAIN, PLAIN] == formats(layers_of(data, latents, encoder))
    rule = {"layers": "*", "spec": {"format": "int8_token_head"}}
    assert refusal({"rules": [rule]}, encoder) == (
        "layer 'encoder' (encoder_only): it keeps no state after a step, so there is nothing to store as "
        "int8_token_head"
    )
    says = "rules[0].spec.format: the cache spec 'mla' of layer 'latents': there is no option named 'format'"
    assert says in refusal({"rules": [rule]}, latents)


# --- refusals ---------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class LinesSpec(KVCacheSpec):
    """Stores a line of text for each token, in a format of its own."""

    kind = "lines"
    format: str

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((0, n),) if n else ()

    def state_tensors(self) -> dict[str, StateTensor]:
        return {"line": StateTensor((self.block_size, 80), "uint8")}


def test_a_type_may_use_the_field_name_format_for_another_purpose() -> None:
    registry = load_plugins(plugins=[plugin("mine", specs={"lines": LinesSpec})]).registry
    described_layer = LayerDescription(name="lines", kind="lines", query={}, options={"format": "utf-8"})
    description = ModelDescription(name="model", layers=(described_layer,), max_model_len=64)
    stack = Stack.from_mapping({"cache": {"format": "int8_token_head"}})
    (made,) = make_layer_specs(description, registry, stack, "float32")
    assert LinesSpec(block_size=16, format="utf-8") == made.spec
    plan = plan_cache(group_layers([made]), memory_bytes=2**16, max_model_len=64, max_num_batched_tokens=64)
    assert "utf-8" == plan.to_dict()["groups"][0]["spec"]["format"]


def test_an_unknown_format_is_named_with_those_that_there_are() -> None:
    assert refusal({"cache": {"format": "int8_token_haed"}}) == (
        "stack: cache.format: there is no KV format named 'int8_token_haed'; known: fp8_tensor, fp8_token_head, "
        "int4_token_head, int8_token_head; did you mean 'int8_token_head'?"
    )
    rule = {"kind": "sliding_window", "spec": {"format": "int5"}}
    assert "layer 'window' (sliding_window): there is no KV format named 'int5'" in refusal({"rules": [rule]})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"name": "int8_token_head", "bits": 7}, "there is no option 'bits'; its options: none"),
        ({"name": "fp8_tensor", "k_scale": 0}, "k_scale must be a positive number, not 0; its options: k_scale"),
        ({"name": "plain", "scale": 1}, "there is no option 'scale'; its options: none"),
    ],
)
def test_options_that_do_not_fit_are_named_with_those_that_there_are(given: dict[str, Any], reason: str) -> None:
    message = refusal({"cache": {"format": given}})
    assert message.startswith(f"stack: cache.format: KV format '{given['name']}': ")
    assert reason in message
    assert reason in refusal({"rules": [{"layers": "full", "spec": {"format": given}}]})


@pytest.mark.parametrize("given", [8, ["int8_token_head"], {"bits": 8}])
def test_a_format_is_a_name_or_a_table(given: object) -> None:
    message = refusal({"rules": [{"layers": "full", "spec": {"format": given}}]})
    assert message.startswith("layer 'full' (full_attention): a format is given by its name, or as a table of a name")


def test_a_layer_that_a_format_cannot_store_is_named() -> None:
    odd = described(name="odd", kind="full_attention", options={"num_kv_heads": 2, "head_size": 7})
    assert refusal({"cache": {"format": "int4_token_head"}}, odd) == (
        "layer 'odd' (full_attention): int4_token_head stores two elements in a byte, and k vectors have 7, an odd "
        "number"
    )


# --- what is planned --------------------------------------------------------------------------------------------------


def test_a_page_has_exactly_the_bytes_of_its_formats() -> None:
    rule = {"kind": "full_attention", "spec": {"format": "int8_token_head"}}
    full, window = layers_of({"rules": [rule]})
    grouping = group_layers([full, window])
    # 16 tokens of 2 heads, keys and values of 8: a byte each and a scale of four bytes; or two bytes each.
    assert [16 * 2 * 2 * (8 + 4), 16 * 2 * 2 * 16] == [group.page_bytes for group in grouping.groups]
    plan = plan_cache(grouping, memory_bytes=1 << 20, max_model_len=64, max_num_batched_tokens=16)
    assert plan.bytes_per_token == 2 * 2 * (8 + 4) + 2 * 2 * 16
    assert {"name": "int8_token_head"} == plan.to_dict()["groups"][0]["spec"]["format"]
    json.dumps(plan.to_dict())


def test_layers_of_other_formats_share_a_block_table() -> None:
    two = [described(name=name, kind="full_attention", options=SIZES) for name in ("first", "second")]
    rule = {"layers": "second", "spec": {"format": "int4_token_head"}}
    (group,) = group_layers(layers_of({"rules": [rule]}, *two)).groups
    assert group.page_bytes == 16 * 2 * 2 * 16 + 16 * 2 * 2 * (4 + 4)


def test_storing_every_token_keeps_the_format() -> None:
    layers = layers_of({"cache": {"format": "fp8_token_head"}})
    (group,) = group_layers(layers, hybrid=False).groups
    assert ["fp8_token_head"] * 2 == [spec.kv_format.name for spec in group.stored]


def test_the_plan_shows_how_each_group_is_stored(tmp_path: Path) -> None:
    (tmp_path / "layers.toml").write_text(
        'max_model_len = 64\n[[layers]]\nname = "layers.{}"\ncount = 2\nkind = "full_attention"\n'
        "num_kv_heads = 2\nhead_size = 8\n"
    )
    (tmp_path / "stack.toml").write_text(
        '[cache]\nformat = "int4_token_head"\n[[rules]]\nlayers = "layers.0"\nspec = { format = "plain" }\n'
    )
    arguments = [
        "plan",
        str(tmp_path / "layers.toml"),
        "--cache-memory",
        "1MiB",
        "--stack",
        str(tmp_path / "stack.toml"),
    ]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(main, arguments)
    assert "float32, int4_token_head" in shown.output
    (group,) = json.loads(run(*arguments, "--json").output)["groups"]
    assert {"layers.0": "plain", "layers.1": "int4_token_head"} == group["formats"]
