"""The stack file: its keys, their meaning, and the one error that lists everything wrong in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvframe.config.stack import (
    CacheOptions,
    EngineOptions,
    LimitOptions,
    ModelOptions,
    ResolvedRule,
    Rule,
    Stack,
    Use,
    parse_bytes,
)
from kvframe.contract.errors import StackError
from kvframe.loading.plugins import PluginPolicy, load_plugins
from tests.loading.fake_distributions import FakeSite, registers
from tests.support.plugins import plugin

EVERYTHING = """
[plugins]
disabled = ["slow"]
required = ["kvframe-fast:fast"]
[plugins.owners.backend]
fast = "kvframe-fast"

[plugin.fast]
tile = 64
deep = { autotune = false }

[cache]
memory = "2GiB"
block_size = 32
hybrid = false
dtype = "bfloat16"
prefix_caching = false
host_memory = "4GiB"
disk = { path = "pages", size = "20GiB" }
stores = ["fast", { name = "far", url = "x" }]
audit = true

[model]
device = "cuda:0"
dtype = "bfloat16"
prefill_skipping = "decode_only"

[limits]
max_num_seqs = 8
max_num_batched_tokens = 512
max_model_len = 4096

[engine]
self_check = false

[[rules]]
kind = "sliding_window"
spec = { window = 128 }
wrappers = ["decode_only", { name = "chunked_local", chunk = 64 }]
backend = "kvframe-fast:fast"

[[rules]]
layers = "model.layers.0.*"
backend = { name = "torch", tile = 32 }
"""


def message(data: dict[str, Any]) -> str:
    with pytest.raises(StackError) as caught:
        Stack.from_mapping(data, "my.toml")
    return str(caught.value)


def rules(*tables: dict[str, Any]) -> Stack:
    return Stack.from_mapping({"rules": list(tables)})


# --- reading ---------------------------------------------------------------------------------------------------------


def test_file_is_read_in_full(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(EVERYTHING)
    assert Stack.from_file(path) == Stack(
        plugins=PluginPolicy(
            disabled=("slow",),
            required=("kvframe-fast:fast",),
            owners={
                "spec": {},
                "wrapper": {},
                "backend": {"fast": "kvframe-fast"},
                "format": {},
                "eviction": {},
                "page_store": {},
                "event_publisher": {},
                "scheduling": {},
                "proposer": {},
                "logits_processor": {},
                "model_adapter": {},
            },
            settings={"fast": {"tile": 64, "deep": {"autotune": False}}},
            source=str(path),
        ),
        cache=CacheOptions(
            memory=2147483648,
            block_size=32,
            hybrid=False,
            dtype="bfloat16",
            prefix_caching=False,
            host_memory=4294967296,
            disk={"path": "pages", "size": "20GiB"},
            stores=(Use("fast"), Use("far", {"url": "x"})),
            audit=True,
        ),
        model=ModelOptions(device="cuda:0", dtype="bfloat16", prefill_skipping=Use("decode_only")),
        limits=LimitOptions(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=4096),
        engine=EngineOptions(self_check=False),
        rules=(
            Rule(
                kind="sliding_window",
                spec={"window": 128},
                wrappers=(Use("decode_only"), Use("chunked_local", {"chunk": 64})),
                backend=Use("kvframe-fast:fast"),
            ),
            Rule(layers="model.layers.0.*", backend=Use("torch", {"tile": 32})),
        ),
        source=str(path),
    )


def test_empty_file_is_the_default_stack() -> None:
    stack = Stack.from_mapping({})
    assert stack.cache == CacheOptions() == Stack().cache
    assert stack.engine == EngineOptions()
    assert stack.rules == ()
    assert (stack.cache.memory, stack.cache.block_size, stack.limits.max_num_batched_tokens) == ("auto", 16, 2048)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"gone\.toml: the stack file cannot be read: No such file or directory"):
        Stack.from_file(tmp_path / "gone.toml")


def test_folder_is_no_stack_file(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="the stack file cannot be read: Is a directory"):
        Stack.from_file(tmp_path)


@pytest.mark.parametrize(("content", "reason"), [(b"[cache\n", "line 1"), (b"\xff\xfe", "start byte at byte 0")])
def test_an_error_in_the_syntax_of_toml_has_its_line(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "torn.toml"
    path.write_bytes(content)
    with pytest.raises(StackError, match=rf"torn\.toml: the stack file is not .*{reason}"):
        Stack.from_file(path)


# --- errors in it ----------------------------------------------------------------------------------------------------


def test_unknown_key_names_file_path_keys_and_nearest() -> None:
    assert message({"cache": {"block_sise": 8}}) == (
        "my.toml: cache.block_sise: there is no key named 'block_sise'; known: audit, block_size, disk, dtype, "
        "events, eviction, format, host_memory, hybrid, key, max_kept_percent, memory, "
        "prefix_caching, stores; did you mean 'block_size'?"
    )


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"cashe": {}}, "cashe"),
        ({"engine": {"devise": "cpu"}}, "engine.devise"),
        ({"plugins": {"disable": []}}, "plugins.disable"),
        ({"plugins": {"owners": {"backends": {}}}}, "plugins.owners.backends"),
        ({"rules": [{"kind": "a"}, {"kind": "a", "wrapper": []}]}, "rules[1].wrapper"),
    ],
)
def test_unknown_key_anywhere_has_its_path_and_nearest(data: dict[str, Any], path: str) -> None:
    text = message(data)
    assert text.startswith(f"my.toml: {path}: there is no key named")
    assert "did you mean" in text


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            {"cache": {"block_size": "16"}},
            "cache.block_size must be a whole number from 1 to 2147483647, not '16'",
        ),
        (
            {"cache": {"block_size": 0}},
            "cache.block_size must be a whole number from 1 to 2147483647, not 0",
        ),
        (
            {"cache": {"block_size": True}},
            "cache.block_size must be a whole number from 1 to 2147483647, not True",
        ),
        (
            {"cache": {"block_size": 1.5}},
            "cache.block_size must be a whole number from 1 to 2147483647, not 1.5",
        ),
        ({"cache": {"hybrid": 1}}, "cache.hybrid must be true or false, not 1 (a whole number)"),
        (
            {"cache": {"memory": "two"}},
            "cache.memory must be 'auto', a number of bytes, or a size like '2GiB', not 'two'",
        ),
        ({"cache": 3}, "cache must be a table, not 3 (a whole number)"),
        (
            {"model": {"device": "the GPU"}},
            "model.device must be 'auto', or a device like 'cpu' or 'cuda:0', not 'the GPU'",
        ),
        ({"limits": {"max_model_len": -1}}, "limits.max_model_len must be a whole number from 1 to 2147483647, not -1"),
        ({"plugins": {"disabled": "slow"}}, "plugins.disabled must be an array of strings, not 'slow' (a string)"),
        ({"plugins": {"owners": {"backend": []}}}, "plugins.owners.backend must be a table of strings, not []"),
        ({"plugin": {"fast": 1}}, "plugin must be a table of tables, not {'fast': 1} (a table)"),
        (
            {"rules": {"kind": "a"}},
            "rules must be an array, not {'kind': 'a'} (a table); each table of an array starts",
        ),
        ({"rules": [3]}, "rules[0] must be a table, not 3 (a whole number)"),
        ({"rules": [{"kind": 3}]}, "rules[0].kind must be a string that is not empty, not 3 (a whole number)"),
        ({"rules": [{"backend": "torch"}]}, "rules[0] needs kind or layers, to say which layers it is for"),
        ({"rules": [{"kind": "a", "wrappers": "b"}]}, "rules[0].wrappers must be an array, not 'b' (a string)"),
        (
            {"rules": [{"kind": "a", "wrappers": ["b", 3]}]},
            "rules[0].wrappers[1] must be a name, or a table of a name",
        ),
        (
            {"rules": [{"kind": "a", "wrappers": [{"k": 1}]}]},
            "rules[0].wrappers[0] needs a name beside its options: name =",
        ),
    ],
)
def test_wrong_value_says_what_was_expected(data: dict[str, Any], sentence: str) -> None:
    assert message(data).startswith(f"my.toml: {sentence}")


def test_wrong_choice_names_the_nearest() -> None:
    assert message({"cache": {"dtype": "bfloat"}}).endswith("not 'bfloat' (a string); did you mean 'bfloat16'?")


def test_all_problems_are_in_one_error() -> None:
    assert message({"cache": {"block_sise": 8, "hybrid": "no"}, "engin": {}}).splitlines() == [
        "my.toml: 3 problems",
        "  cache.hybrid must be true or false, not 'no' (a string)",
        "  cache.block_sise: there is no key named 'block_sise'; known: audit, block_size, disk, dtype, events, "
        "eviction, format, host_memory, hybrid, key, max_kept_percent, memory, "
        "prefix_caching, stores; did you mean 'block_size'?",
        "  engin: there is no key named 'engin'; known: cache, engine, limits, model, plugin, plugins, rules; "
        "did you mean 'engine'?",
    ]


def test_host_memory_is_a_size() -> None:
    assert message({"cache": {"host_memory": "auto"}}) == (
        "my.toml: cache.host_memory must be a number of bytes, or a size like '2GiB', not 'auto' (a string)"
    )


def test_options_given_in_python_are_checked_alike() -> None:
    with pytest.raises(
        StackError, match=r"CacheOptions\.block_size must be a whole number from 1 to 2147483647, not 0"
    ):
        CacheOptions(block_size=0)
    with pytest.raises(StackError, match=r"CacheOptions\.memory must be 'auto', a number of bytes"):
        CacheOptions(memory="plenty")
    with pytest.raises(StackError, match=r"PluginPolicy\.disabled must be an array of strings, not 'slow'"):
        PluginPolicy(disabled="slow")  # type: ignore[arg-type]


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "size"),
    [
        (1, 1),
        (512, "512"),
        (512, "512B"),
        (2_000, "2KB"),
        (2_048, "2KiB"),
        (5_000_000, "5 MB"),
        (1_610_612_736, "1.5GiB"),
        (1_099_511_627_776, " 1TiB "),
    ],
)
def test_sizes(num_bytes: int, size: str | int) -> None:
    assert num_bytes == parse_bytes(size)


@pytest.mark.parametrize("size", ["", "GiB", "2 gigs", "-1GiB", "0", "0.1B", 0, -5, True, 1.5, "1e9", "2gib"])
def test_a_value_that_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(StackError, match="size"):
        parse_bytes(size)


# --- rules -----------------------------------------------------------------------------------------------------------


def test_layer_that_no_rule_names_gets_the_defaults() -> None:
    assert Stack().rule_for("model.layers.0", "full_attention") == ResolvedRule({}, None, Use("auto"))


def test_rule_by_kind_holds_for_that_kind_only() -> None:
    stack = rules({"kind": "sliding_window", "backend": "torch"})
    assert stack.rule_for("any", "sliding_window").backend == Use("torch")
    assert stack.rule_for("any", "full_attention").backend == Use("auto")


@pytest.mark.parametrize(
    ("pattern", "layer", "matches"),
    [
        ("*", "model.layers.3.self_attn", True),
        ("model.layers.?.self_attn", "model.layers.3.self_attn", True),
        ("model.layers.?.self_attn", "model.layers.13.self_attn", False),
        ("model.layers.[0-2].*", "model.layers.3.self_attn", False),
        ("MODEL.*", "model.layers.3", False),
    ],
)
def test_rule_by_name_is_a_pattern(pattern: str, layer: str, matches: bool) -> None:
    assert matches == (rules({"layers": pattern, "backend": "torch"}).rule_for(layer, "a").backend == Use("torch"))


def test_kind_and_name_must_both_match() -> None:
    stack = rules({"kind": "a", "layers": "x.*", "backend": "torch"})
    assert [stack.rule_for(*layer).backend.name for layer in (("x.1", "a"), ("x.1", "b"), ("y.1", "a"))] == [
        "torch",
        "auto",
        "auto",
    ]


def test_later_rule_wins_key_by_key() -> None:
    stack = rules(
        {"layers": "*", "spec": {"window": 8, "sinks": 4}, "wrappers": ["a"], "backend": "torch"},
        {"kind": "k", "spec": {"window": 16}},
        {"kind": "k", "wrappers": []},
    )
    assert stack.rule_for("x", "k") == ResolvedRule({"window": 16, "sinks": 4}, (), Use("torch"))


# --- names -----------------------------------------------------------------------------------------------------------


def test_names_that_exist_pass(site: FakeSite) -> None:
    site.add("kvframe-fast", "fast", registers("wrappers", ("local", "a:B")))
    stack = rules(
        {"kind": "full_attention", "wrappers": ["local"], "backend": "torch_reference"},
        {"layers": "*", "backend": "auto"},
        {"layers": "*", "backend": "kvframe:torch_reference"},
    )
    stack.check_names(load_plugins().registry)


def test_unknown_names_are_one_error_with_path_and_nearest(site: FakeSite) -> None:
    stack = Stack.from_mapping(
        {
            "plugins": {"owners": {"backend": {"tortch_reference": "kvframe", "torch_reference": "kvfrane"}}},
            "rules": [{"kind": "ful_attention", "wrappers": ["local"], "backend": "torch_referense"}],
        },
        "my.toml",
    )
    with pytest.raises(StackError) as caught:
        stack.check_names(load_plugins().registry)
    assert str(caught.value).splitlines() == [
        "my.toml: 5 problems",
        "  plugins.owners.backend.tortch_reference: there is no backend named 'tortch_reference'; known: "
        "torch_reference; did you mean 'torch_reference'?",
        "  plugins.owners.backend.torch_reference: there is no owner named 'kvfrane'; known: kvframe; did you mean "
        "'kvframe'?",
        "  rules[0].kind: there is no cache spec named 'ful_attention'; known: full_attention; "
        "did you mean 'full_attention'?",
        "  rules[0].wrappers[0]: there is no wrapper named 'local'; none is known",
        "  rules[0].backend: there is no backend named 'torch_referense'; known: torch_reference; did you mean "
        "'torch_reference'?",
    ]


def test_an_unknown_wrapper_for_prefill_skipping_is_named(site: FakeSite) -> None:
    stack = Stack.from_mapping({"model": {"prefill_skipping": "decode_only"}}, "my.toml")
    with pytest.raises(StackError, match=r"my.toml: model.prefill_skipping: there is no wrapper named 'decode_only'"):
        stack.check(load_plugins().registry)


WRAPPERS = """
import attrs
from kvframe.contract import MetadataWrapper

@attrs.frozen(kw_only=True)
class Cut(MetadataWrapper):
    name = "cut"
    fields = {}
    effects = frozenset({"pieces"})
    def __call__(self, metadata):
        return metadata

@attrs.frozen(kw_only=True)
class Pick(MetadataWrapper):
    name = "pick"
    fields = {}
    not_after = frozenset({"pieces", "pick"})
    def __call__(self, metadata):
        return metadata
"""


def chain(site: FakeSite, *names: str) -> Stack:
    site.add(
        "kvframe-cut",
        "cut",
        registers("wrappers", ("cut", "kvframe_cut.wrappers:Cut"), ("pick", "kvframe_cut.wrappers:Pick")),
        files={"wrappers": WRAPPERS},
    )
    return Stack.from_mapping({"rules": [{"layers": "*", "wrappers": list(names)}]}, "my.toml")


def test_an_illegal_order_of_wrappers_is_refused_with_the_legal_one(site: FakeSite) -> None:
    stack = chain(site, "cut", "pick")
    with pytest.raises(StackError) as caught:
        stack.check(load_plugins(stack.plugins).registry)
    assert str(caught.value) == (
        "my.toml: rules[0].wrappers: wrapper 'pick' cannot come after 'cut' (pieces); "
        "the legal order is ['pick', 'cut']"
    )


def test_wrappers_that_fit_in_no_order_are_refused(site: FakeSite) -> None:
    stack = chain(site, "pick", "pick")
    with pytest.raises(StackError, match="'pick' cannot come after 'pick'; these wrappers cannot be combined in any"):
        stack.check(load_plugins(stack.plugins).registry)


def test_a_legal_order_of_wrappers_passes(site: FakeSite) -> None:
    stack = chain(site, "pick", "cut")
    stack.check(load_plugins(stack.plugins).registry)


def test_contested_name_in_a_rule_is_refused(site: FakeSite) -> None:
    site.add("kvframe-a", "a", registers("backends", ("fast", "a:A")))
    site.add("kvframe-b", "b", registers("backends", ("fast", "b:B")))
    with pytest.raises(StackError, match=r"rules\[0\]\.backend: backend 'fast' is claimed by kvframe-a and kvframe-b"):
        rules({"layers": "*", "backend": "fast"}).check_names(load_plugins().registry)


def test_policy_of_a_file_reaches_the_plugins(site: FakeSite) -> None:
    site.add("kvframe-slow", "slow", "import no_such_library")
    stack = Stack.from_mapping({"plugins": {"disabled": ["slow"]}}, "my.toml")
    assert load_plugins(stack.plugins).record("slow").reason == "my.toml disables it"


# --- rules and layers -------------------------------------------------------------------------------------------------


KINDS = {"model.layers.0.attn": "sliding_window", "model.layers.1.attn": "full_attention"}


def unmatched(*tables: dict[str, Any]) -> str:
    with pytest.raises(StackError) as caught:
        Stack.from_mapping({"rules": list(tables)}, "my.toml").check_layers("tiny", KINDS)
    return str(caught.value)


def test_a_rule_that_is_for_no_layer_is_refused_with_the_nearest() -> None:
    end = "; if the stack is for other models too, give the rule optional = true"
    assert unmatched({"layers": "*", "backend": "torch"}, {"kind": "mla", "backend": "torch"}) == (
        'my.toml: rules[1] (kind = "mla") is for no layer of tiny, whose layers are of the kind '
        f"'full_attention', 'sliding_window'{end}"
    )
    assert unmatched({"layers": "model.layer.0.*", "backend": "torch"}) == (
        'my.toml: rules[0] (layers = "model.layer.0.*") is for no layer of tiny; the nearest names are '
        f"'model.layers.0.attn', 'model.layers.1.attn'{end}"
    )
    assert "the nearest names are 'model.layers.1.attn';" in unmatched(
        {"kind": "full_attention", "layers": "*.0.*", "backend": "torch"}
    )
    assert unmatched({"kind": "a"}, {"layers": "b"}).startswith("my.toml: 2 problems\n")


def test_an_optional_rule_may_be_for_no_layer() -> None:
    stack = rules({"kind": "mla", "backend": "torch", "optional": True}, {"layers": "*.1.*", "backend": "torch"})
    stack.check_layers("tiny", KINDS)
    assert message({"rules": [{"kind": "mla", "optional": 1}]}).startswith("my.toml: rules[0].optional must be true or")


def test_a_name_knows_the_key_that_it_was_given_by() -> None:
    stack = Stack.from_mapping(
        {
            "cache": {"format": "fp8_tensor", "eviction": {"name": "scan_resistant"}},
            "model": {"prefill_skipping": "decode_only"},
            "rules": [{"layers": "*", "backend": "torch", "wrappers": ["a", "b"]}],
        },
        "my.toml",
    )
    rule, skipping = stack.rules[0], stack.model.prefill_skipping
    assert rule.backend is not None
    assert rule.wrappers is not None
    assert skipping is not None
    assert stack.cache.format is not None
    assert "my.toml: rules[0].backend" == rule.backend.origin
    assert ["my.toml: rules[0].wrappers[0]", "my.toml: rules[0].wrappers[1]"] == [use.origin for use in rule.wrappers]
    assert "my.toml: model.prefill_skipping" == skipping.origin
    assert ["my.toml: cache.format", "my.toml: cache.eviction"] == [
        stack.cache.format.origin,
        stack.cache.eviction.origin,
    ]


def test_values_of_a_command_line_replace_the_stack_s_own() -> None:
    stack = Stack.from_mapping(
        {"cache": {"memory": "1GiB"}, "model": {"dtype": "float16"}, "limits": {"max_num_seqs": 3}}
    )
    changed = stack.with_options(cache={"memory": "2GiB", "block_size": None}, model={"dtype": "float64"})
    assert (2 << 30, 16, 3, "float64") == (
        changed.cache.memory,
        changed.cache.block_size,
        changed.limits.max_num_seqs,
        changed.model.dtype,
    )
    assert stack == stack.with_options()
    with pytest.raises(StackError, match=r"^--max-model-len must be a whole number"):
        stack.with_options(limits={"max_model_len": 0})


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [("device", "cpu", "'device' of [model]"), ("max_num_seq", 3, "'max_num_seqs' of [limits]")],
)
def test_a_key_in_the_wrong_table_names_its_own_table(key: str, value: object, meant: str) -> None:
    assert f"did you mean {meant}?" in message({"engine": {key: value}})


@pytest.mark.parametrize(
    ("events", "use"),
    [
        ("tcp://127.0.0.1:5557", Use("zmq", {"endpoint": "tcp://127.0.0.1:5557"})),
        ({"name": "zmq", "endpoint": "ipc://x", "buffer": 9}, Use("zmq", {"endpoint": "ipc://x", "buffer": 9})),
        ("radio", Use("radio")),
    ],
)
def test_events_are_published_at_an_address_or_by_a_named_publisher(events: object, use: Use) -> None:
    stack = Stack.from_mapping({"cache": {"events": events}})
    assert stack.cache.events is not None
    assert (use, "stack: cache.events") == (stack.cache.events, stack.cache.events.origin)


def test_a_stack_names_a_registered_event_publisher() -> None:
    registry = load_plugins().registry
    Stack.from_mapping({"cache": {"events": "tcp://127.0.0.1:5557"}}).check(registry)
    with_radio = load_plugins(plugins=[plugin("shop", event_publishers={"radio": "a:B"})]).registry
    Stack.from_mapping({"cache": {"events": "radio"}}).check_names(with_radio)
    with pytest.raises(StackError, match=r"^stack: cache\.events: .*no event publisher named 'zqm'.*'zmq'\?$"):
        Stack.from_mapping({"cache": {"events": "zqm"}}).check_names(registry)
    with pytest.raises(StackError, match=r"cache\.events: event publisher 'zmq': endpoint must be like tcp://"):
        Stack.from_mapping({"cache": {"events": "http://127.0.0.1:5557"}}).check(registry)


def test_a_stack_names_registered_page_stores() -> None:
    registry = load_plugins(plugins=[plugin("shop", page_stores={"shelf": "a:B"})]).registry
    Stack.from_mapping({"cache": {"stores": ["shelf"]}}).check_names(registry)
    with pytest.raises(StackError, match=r"^stack: cache\.stores\[0\]: .*'shelff'.*did you mean 'shelf'\?$"):
        Stack.from_mapping({"cache": {"stores": ["shelff"]}}).check_names(registry)
