"""Layer files: which keys they take, what the layers become, and the one sentence for each mistake."""

import json
from pathlib import Path

import pytest

from kvframe.contract.errors import ModelError
from kvframe.planning.layer_file import is_layer_file, read_layer_file

FULL = {"kind": "full_attention", "num_kv_heads": 2, "head_size": 64}


def write(tmp_path: Path, data: object, name: str = "layers.json") -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(data) if not isinstance(data, str) else data)
    return path


def read_names(tmp_path: Path, data: object) -> list[str]:
    return [layer.name for layer in read_layer_file(write(tmp_path, data)).layers]


def test_count_numbers_layers_through_the_whole_model(tmp_path: Path) -> None:
    layers = [{"name": "l.{}", "count": 2, **FULL}, {"name": "m.{}", **FULL}]
    assert read_names(tmp_path, {"max_model_len": 8, "layers": layers}) == ["l.0", "l.1", "m.2"]


def test_repeat_repeats_the_whole_list(tmp_path: Path) -> None:
    layers = [{"name": "l.{}", **FULL}, {"name": "m.{}", **FULL}]
    assert read_names(tmp_path, {"max_model_len": 8, "repeat": 2, "layers": layers}) == ["l.0", "m.1", "l.2", "m.3"]


def test_names_lists_layers_of_one_kind(tmp_path: Path) -> None:
    assert read_names(tmp_path, {"max_model_len": 8, "layers": [{"names": ["a", "b"], **FULL}]}) == ["a", "b"]


def test_every_other_key_is_an_option_of_the_spec(tmp_path: Path) -> None:
    entry = {"name": "a", "kind": "sliding_window", "num_kv_heads": 1, "head_size": 16, "window": 5}
    (layer,) = read_layer_file(write(tmp_path, {"max_model_len": 8, "layers": [entry]})).layers
    assert layer.kind == "sliding_window"
    assert layer.options == {"num_kv_heads": 1, "head_size": 16, "window": 5}


def test_the_query_side_is_taken_from_the_cache_side(tmp_path: Path) -> None:
    (layer,) = read_layer_file(write(tmp_path, {"max_model_len": 8, "layers": [{"name": "a", **FULL}]})).layers
    assert layer.query == {"num_heads": 2, "head_size": 64, "scale": 0.125}


def test_the_query_side_given_wins(tmp_path: Path) -> None:
    entry = {"name": "a", **FULL, "query": {"num_heads": 8, "scale": 1.0, "soft_cap": 50.0}}
    (layer,) = read_layer_file(write(tmp_path, {"max_model_len": 8, "layers": [entry]})).layers
    assert layer.query == {"num_heads": 8, "head_size": 64, "scale": 1.0, "soft_cap": 50.0}


def test_a_negative_number_shares_with_a_layer_before(tmp_path: Path) -> None:
    layers = [{"name": "l.{}", "count": 2, **FULL}, {"name": "l.{}", "shares_with": -2, **FULL}]
    description = read_layer_file(write(tmp_path, {"max_model_len": 8, "layers": layers}))
    assert [layer.shares_with for layer in description.layers] == [None, None, "l.0"]


def test_a_layer_without_query_and_kv_heads_keeps_a_state(tmp_path: Path) -> None:
    entries = [
        {"name": "a", "kind": "state", "head_size": 16},
        {"name": "b", "kind": "state", "query": {"num_heads": 2}},
    ]
    state, attending = read_layer_file(write(tmp_path, {"max_model_len": 8, "layers": entries})).layers
    assert ({"head_size": 16}, {}) == (state.options, state.query)
    assert {"num_heads": 2} == attending.query


def test_the_longest_input_of_an_encoder_is_given_beside_the_longest_request(tmp_path: Path) -> None:
    description = read_layer_file(write(tmp_path, {"max_model_len": 8, "max_encoder_len": 1500, "layers": []}))
    assert {"encoder": 1500} == description.max_input_lens
    assert {} == read_layer_file(write(tmp_path, {"max_model_len": 8, "layers": []})).max_input_lens


def test_toml_says_the_same(tmp_path: Path) -> None:
    text = 'name = "m"\nmax_model_len = 9\n[[layers]]\nname = "a"\nkind = "full_attention"\nnum_kv_heads = 2\n'
    description = read_layer_file(write(tmp_path, text, "layers.toml"))
    assert ("m", 9) == (description.name, description.max_model_len)
    assert description.layers[0].options == {"num_kv_heads": 2}


def test_a_file_without_a_name_is_named_after_itself(tmp_path: Path) -> None:
    assert read_layer_file(write(tmp_path, {"max_model_len": 8, "layers": []})).name == "layers"


def test_a_config_of_a_model_is_no_layer_file(tmp_path: Path) -> None:
    assert not is_layer_file(write(tmp_path, {"model_type": "llama", "num_hidden_layers": 2}, "config.json"))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("{", "is not valid JSON: Expecting property name"),
        ("[1]", "holds a list, not a table with max_model_len and layers"),
        ({"max_model_len": 8, "layer": []}, "there is no key named 'layer'; known: .*; did you mean 'layers'"),
        ({"layers": []}, "max_model_len must be a whole number of at least 1 and at most 2147483647, not None"),
        (
            {"max_model_len": True, "layers": []},
            "max_model_len must be a whole number of at least 1 and at most 2147483647, not True",
        ),
        (
            {"max_model_len": 8, "max_encoder_len": 0, "layers": []},
            "max_encoder_len must be a whole number of at least 1",
        ),
        (
            {"max_model_len": 10**18, "layers": []},
            "max_model_len must be a whole number of at least 1 and at most 2147483647",
        ),
        (
            {"max_model_len": 8, "repeat": 10**18, "layers": []},
            "repeat must be a whole number of at least 1 and at most 10",
        ),
        (
            {"max_model_len": 8, "repeat": 2, "layers": [{"name": "{}", "count": 9999, **FULL}]},
            "has at most 10000 layers",
        ),
        ({"max_model_len": 8, "layers": {"a": 1}}, "layers must be a list of tables"),
        ({"max_model_len": 8, "layers": [{"name": "a"}]}, r"layers\[0\].kind must name a cache spec"),
        ({"max_model_len": 8, "layers": [FULL]}, r"layers\[0\] needs a name"),
        ({"max_model_len": 8, "layers": [{"name": "a", "count": 2, **FULL}]}, "so its name must hold {}"),
        ({"max_model_len": 8, "layers": [{"name": "a", "count": 0, **FULL}]}, r"layers\[0\].count must be a whole"),
        ({"max_model_len": 8, "layers": [{"names": ["a"], "count": 1, **FULL}]}, "has both names and count"),
        ({"max_model_len": 8, "layers": [{"name": "a", "query": 3, **FULL}]}, r"layers\[0\].query must be a table"),
        (
            {"max_model_len": 8, "layers": [{"name": "a", "query": {"softcap": 3.0}, **FULL}]},
            r"no key named 'layers\[0\].query.softcap'.* did you mean 'layers\[0\].query.soft_cap'",
        ),
        ({"max_model_len": 8, "layers": [{"name": "a", "shares_with": -1, **FULL}]}, r"layers\[0\].shares_with must"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, data: object, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_layer_file(write(tmp_path, data))
