"""Loading plugins: the meaning of each status, and that no plugin can keep another one from loading."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest

from kvframe.contract import hookspecs
from kvframe.contract.errors import KVFrameError, PluginError, StackError, UnknownNameError
from kvframe.loading.misnamed import find_misnamed
from kvframe.loading.plugins import PluginHost, PluginPolicy, load_plugins
from tests.loading.fake_distributions import MANIFEST, FakeSite, registers
from tests.support.plugins import plugin

GOOD = registers("backends", ("good", "kvframe_good.backend:Good"))


def statuses(host: PluginHost) -> dict[str, str]:
    return {record.id: record.status for record in host.records}


def add_good(site: FakeSite) -> None:
    """A plugin whose name sorts after all others of these tests, so it is loaded last."""
    site.add("kvframe-zz-good", "zz_good", GOOD)


# --- loaded ----------------------------------------------------------------------------------------------------------


def test_builtin_plugin_loads_with_nothing_installed(site: FakeSite) -> None:
    host = load_plugins()
    assert statuses(host) == {"kvframe:builtin": "loaded"}
    assert host.registry.specs.names() == ("full_attention",)
    assert host.registry.backends.names() == ("torch_reference",)


def test_record_says_distribution_versions_and_status(site: FakeSite) -> None:
    site.add("kvframe-good", "good", GOOD, version="2.5")
    record = load_plugins().record("good")
    assert (record.name, record.distribution, record.version, record.api_version, record.status, record.reason) == (
        "good",
        "kvframe-good",
        "2.5",
        "1.0",
        "loaded",
        "",
    )


def test_every_kind_of_name_is_registered(site: FakeSite) -> None:
    hooks = [hook.removeprefix("kvframe_register_") for hook in HOOKS if hook.startswith("kvframe_register_")]
    assert 11 == len(hooks)
    manifest = "".join(registers(hook, (f"my_{hook}", "kvframe_all.things:Thing")) for hook in hooks)
    site.add("kvframe-all", "all", manifest)
    registry = load_plugins().registry
    assert "my_specs" in registry.specs
    assert registry.wrappers.names() == ("my_wrappers",)
    assert "my_backends" in registry.backends
    assert registry.formats.names() == ("my_formats",)
    assert registry.eviction_policies.names() == ("my_eviction_policies",)
    assert registry.page_stores.names() == ("my_page_stores",)
    assert registry.event_publishers.names() == ("my_event_publishers",)
    assert registry.scheduling_policies.names() == ("my_scheduling_policies",)
    assert registry.proposers.names() == ("my_proposers",)
    assert registry.logits_processors.names() == ("my_logits_processors",)
    assert registry.model_adapters.names() == ("my_model_adapters",)


def test_hooks_run_in_life_cycle_order(site: FakeSite) -> None:
    site.add(
        "kvframe-order",
        "order",
        MANIFEST
        + """
calls = []
@hookimpl
def kvframe_register_eviction_policies(register): calls.append("eviction_policies")
@hookimpl
def kvframe_register_formats(register): calls.append("formats")
@hookimpl
def kvframe_register_backends(register): calls.append("backends")
@hookimpl
def kvframe_register_specs(register): calls.append("specs")
@hookimpl
def kvframe_configure(settings): calls.append("configure")
""",
    )
    load_plugins()
    assert sys.modules["kvframe_order.manifest_order"].calls == [
        "configure",
        "specs",
        "backends",
        "formats",
        "eviction_policies",
    ]


def test_two_plugins_of_one_distribution_both_load(site: FakeSite) -> None:
    site.add("kvframe-pair", "left")
    site.add("kvframe-pair", "right")
    assert statuses(load_plugins()) == {
        "kvframe:builtin": "loaded",
        "kvframe-pair:left": "loaded",
        "kvframe-pair:right": "loaded",
    }


def test_distribution_names_are_normalised(site: FakeSite) -> None:
    site.add("KVFrame_Odd", "odd")
    assert load_plugins(PluginPolicy(required=("kvframe.odd:odd",))).record("odd").distribution == "kvframe-odd"


def test_of_two_copies_of_a_distribution_the_first_on_the_path_is_installed(site: FakeSite) -> None:
    site.add("kvframe-good", "good", GOOD, version="1.0")
    site.add("kvframe-good", "good", GOOD, version="2.0")
    assert [record.name for record in load_plugins().records] == ["builtin", "good"]


# --- broken ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise SystemExit('no GPU, giving up')", "SystemExit: no GPU, giving up"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_manifest_that_fails_to_import_is_set_aside_alone(site: FakeSite, manifest: str, reason: str) -> None:
    site.add("kvframe-bad", "bad", manifest)
    add_good(site)
    host = load_plugins()
    record = host.record("bad")
    assert record.status == "broken"
    assert record.distribution == "kvframe-bad"
    assert "importing kvframe_bad.manifest_bad failed" in record.reason
    assert reason in record.reason
    assert record.cause is not None
    assert host.record("zz_good").status == "loaded"


def test_entry_point_to_a_missing_module_is_set_aside_alone(site: FakeSite) -> None:
    site.write_metadata("kvframe-gone", "[kvframe.v1]\ngone = kvframe_gone.plugin\n[kvframe.v1.api]\ngone = v1_0")
    add_good(site)
    assert statuses(load_plugins())["kvframe-gone:gone"] == "broken"
    assert statuses(load_plugins())["kvframe-zz-good:zz_good"] == "loaded"


def test_misspelt_hook_is_broken_and_the_nearest_is_named(site: FakeSite) -> None:
    site.add("kvframe-typo", "typo", registers("backend", ("fast", "a:B")))
    add_good(site)
    host = load_plugins()
    assert host.record("typo").status == "broken"
    assert host.record("typo").reason == (
        "there is no hook named 'kvframe_register_backend'; did you mean 'kvframe_register_backends'?"
    )
    assert host.record("zz_good").status == "loaded"


def test_misspelt_function_without_marker_is_broken_too(site: FakeSite) -> None:
    site.add("kvframe-typo", "typo", "def kvframe_registr_specs(register): ...")
    assert "did you mean 'kvframe_register_specs'?" in load_plugins().record("typo").reason


def test_hook_without_its_marker_is_broken(site: FakeSite) -> None:
    site.add("kvframe-bare", "bare", "def kvframe_register_specs(register): ...")
    record = load_plugins().record("bare")
    assert (record.status, record.reason) == (
        "broken",
        "kvframe_register_specs lacks @hookimpl and would never be called",
    )


def test_hook_of_a_later_version_may_be_marked_optional(site: FakeSite) -> None:
    site.add("kvframe-new", "new", MANIFEST + "@hookimpl(optionalhook=True)\ndef kvframe_of_tomorrow(): ...\n")
    assert load_plugins().record("new").status == "loaded"


def test_unknown_argument_of_a_hook_is_broken(site: FakeSite) -> None:
    site.add("kvframe-arg", "arg", MANIFEST + "@hookimpl\ndef kvframe_register_specs(registrar): ...\n")
    record = load_plugins().record("arg")
    assert record.status == "broken"
    assert "registrar" in record.reason


def test_manifest_without_any_hook_is_broken(site: FakeSite) -> None:
    site.add("kvframe-empty", "empty", "")
    assert "implements no hook; hooks: kvframe_configure, " in load_plugins().record("empty").reason


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [
        ("kvframe_configure", "settings"),
        ("kvframe_register_specs", "register"),
        ("kvframe_register_model_adapters", "register"),
    ],
)
def test_raising_hook_sets_its_own_plugin_aside_only(site: FakeSite, hook: str, arguments: str) -> None:
    site.add("kvframe-bad", "bad", MANIFEST + f"@hookimpl\ndef {hook}({arguments}): raise RuntimeError('out of luck')")
    add_good(site)
    host = load_plugins()
    record = host.record("bad")
    assert (record.status, record.reason) == ("broken", f"{hook} failed: RuntimeError: out of luck")
    assert isinstance(record.cause, RuntimeError)
    assert host.record("zz_good").status == "loaded"


def test_plugin_that_fails_half_way_registers_nothing(site: FakeSite) -> None:
    late_failure = "@hookimpl\ndef kvframe_register_model_adapters(register): raise RuntimeError\n"
    site.add("kvframe-half", "half", registers("backends", ("half", "a:B")) + late_failure)
    assert "half" not in load_plugins().registry.backends


@pytest.mark.parametrize("name", ["CamelCase", "with-dash", "2fast", "", "__x", "auto"])
def test_registered_backend_name_must_be_snake_case_and_not_reserved(site: FakeSite, name: str) -> None:
    site.add("kvframe-name", "name", registers("backends", (name, "a:B")))
    record = load_plugins().record("name")
    assert record.status == "broken"
    assert repr(name) in record.reason


@pytest.mark.parametrize("target", ["no_colon", "a:b:c", "a b:C", "", ":C", "a:"])
def test_registered_target_must_be_an_import_string(site: FakeSite, target: str) -> None:
    site.add("kvframe-target", "target", registers("backends", ("x", target)))
    assert "must be like 'package.module:Class'" in load_plugins().record("target").reason


def test_registering_hook_that_is_a_generator_is_broken(site: FakeSite) -> None:
    site.add("kvframe-gen", "gen", MANIFEST + "@hookimpl\ndef kvframe_register_specs(register): yield 1\n")
    assert "must call register(...) and return nothing" in load_plugins().record("gen").reason


def test_unreadable_entry_points_are_reported(site: FakeSite) -> None:
    site.write_metadata("kvframe-torn", "[kvframe.v1]\nthis line has no equals sign")
    add_good(site)
    host = load_plugins()
    assert host.record("kvframe-torn").status == "broken"
    assert "reading entry_points.txt failed: " in host.record("kvframe-torn").reason
    assert host.record("zz_good").status == "loaded"


def test_metadata_without_a_name_is_reported(site: FakeSite) -> None:
    site.add("kvframe-lost", "lost")
    next(site.root.glob("*.dist-info/METADATA")).write_text("")
    record = load_plugins().record("unknown")
    assert record.status == "broken"
    assert str(site.root) in record.reason


def test_name_listed_twice_by_one_distribution_is_broken(site: FakeSite) -> None:
    site.add("kvframe-twice", "twice")
    site.add("kvframe-twice", "twice")
    assert {record.status for record in load_plugins().records if record.name == "twice"} == {"broken"}


# --- incompatible ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "stated", "cure"),
    [
        ("v1_1", "1.1", "upgrade kvframe, or install an older kvframe-new"),
        ("v2_0", "2.0", "upgrade kvframe, or install an older kvframe-new"),
        ("v0_9", "0.9", "install a newer kvframe-new"),
    ],
)
def test_newer_minor_or_other_major_is_refused_before_import(site: FakeSite, api: str, stated: str, cure: str) -> None:
    module = site.add("kvframe-new", "new", GOOD, api=api)
    add_good(site)
    host = load_plugins()
    record = host.record("new")
    assert (record.status, record.api_version) == ("incompatible", stated)
    assert record.reason == (
        f"kvframe-new was written for contract version {stated} and this kvframe speaks 1.0; {cure}"
    )
    assert module not in sys.modules
    assert "kvframe_new" not in sys.modules
    assert host.record("zz_good").status == "loaded"


def test_older_minor_loads(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hookspecs, "API_VERSION", "1.7")
    site.add("kvframe-old", "old", GOOD, api="v1_3")
    record = load_plugins().record("old")
    assert (record.status, record.api_version) == ("loaded", "1.3")


def test_plugin_that_states_no_version_is_refused_with_the_entry_to_add(site: FakeSite) -> None:
    module = site.add("kvframe-mute", "mute", GOOD, api=None)
    record = load_plugins().record("mute")
    assert record.status == "incompatible"
    assert 'its entry-point group "kvframe.v1.api" must hold mute = "v1_0"' in record.reason
    assert module not in sys.modules


def test_version_that_is_none_is_incompatible(site: FakeSite) -> None:
    site.add("kvframe-odd", "odd", GOOD, api="one_zero")
    assert "states 'one_zero'" in load_plugins().record("odd").reason


@pytest.mark.parametrize(
    ("group", "cure"),
    [
        ("kvframe.v0", "install a newer kvframe-gen"),
        ("kvframe.v2", "upgrade kvframe, or install an older kvframe-gen"),
    ],
)
def test_other_generation_is_listed_and_not_imported(site: FakeSite, group: str, cure: str) -> None:
    module = site.add("kvframe-gen", "gen", GOOD, group=group)
    record = load_plugins().record("gen")
    assert record.status == "incompatible"
    assert group in record.reason
    assert record.reason.endswith(cure)
    assert module not in sys.modules


def test_plugin_that_speaks_two_generations_loads_in_ours(site: FakeSite) -> None:
    site.add("kvframe-both", "both", GOOD, group="kvframe.v2")
    site.add("kvframe-both", "both", GOOD)
    assert [record.status for record in load_plugins().records if record.name == "both"] == ["loaded"]


# --- conflict --------------------------------------------------------------------------------------------------------


def test_two_distributions_with_one_plugin_name_are_both_named_and_neither_loads(site: FakeSite) -> None:
    modules = {site.add("kvframe-a", "fast", GOOD), site.add("kvframe-b", "fast", GOOD)}
    add_good(site)
    host = load_plugins()
    assert statuses(host) == {
        "kvframe:builtin": "loaded",
        "kvframe-a:fast": "conflict",
        "kvframe-b:fast": "conflict",
        "kvframe-zz-good:zz_good": "loaded",
    }
    assert host.record("kvframe-a:fast").reason == (
        "a plugin named 'fast' is provided by kvframe-a and kvframe-b, so none of them is used; "
        'disable all but one, for example: [plugins] disabled = ["kvframe-b:fast"]'
    )
    assert not modules & set(sys.modules)


def test_disabling_one_of_two_by_its_id_loads_the_other(site: FakeSite) -> None:
    site.add("kvframe-a", "fast", GOOD)
    site.add("kvframe-b", "fast", GOOD)
    host = load_plugins(PluginPolicy(disabled=("kvframe-b:fast",)))
    assert host.record("kvframe-a:fast").status == "loaded"
    assert host.record("kvframe-b:fast").status == "disabled"


def test_incompatible_plugin_clashes_with_no_other(site: FakeSite) -> None:
    site.add("kvframe-a", "fast", GOOD)
    site.add("kvframe-b", "fast", GOOD, api="v1_9")
    host = load_plugins()
    assert host.record("kvframe-a:fast").status == "loaded"
    assert host.record("kvframe-b:fast").status == "incompatible"


def test_builtin_name_cannot_be_claimed(site: FakeSite) -> None:
    manifest = registers("specs", ("mine", "a:B"), ("full_attention", "a:B"))
    site.add("kvframe-greedy", "greedy", manifest)
    host = load_plugins()
    record = host.record("greedy")
    assert record.status == "conflict"
    assert record.reason == ("cache spec 'full_attention' is built in and cannot be claimed; register another name")
    assert host.registry.specs.names() == ("full_attention",)
    assert host.registry.specs.get("full_attention").owner == "kvframe"


def test_builtin_plugins_name_cannot_be_taken(site: FakeSite) -> None:
    site.add("kvframe-usurper", "builtin", GOOD)
    assert statuses(load_plugins()) == {"kvframe:builtin": "loaded", "kvframe-usurper:builtin": "conflict"}


# --- disabled, required ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bad", "kvframe-bad:bad", "KVFrame_Bad:bad"])
def test_disabled_plugin_is_not_imported(site: FakeSite, name: str) -> None:
    module = site.add("kvframe-bad", "bad", GOOD)
    record = load_plugins(PluginPolicy(disabled=(name,), source="my.toml")).record("bad")
    assert (record.status, record.reason) == ("disabled", "my.toml disables it")
    assert module not in sys.modules


def test_misspelt_disabled_name_is_refused_with_the_nearest(site: FakeSite) -> None:
    site.add("kvframe-good", "good", GOOD)
    with pytest.raises(StackError, match=r"my\.toml: plugins\.disabled: .*'godo'.*did you mean 'good'\?"):
        load_plugins(PluginPolicy(disabled=("godo",), source="my.toml"))


def test_builtin_plugin_cannot_be_disabled(site: FakeSite) -> None:
    with pytest.raises(StackError, match="'builtin' is built in and cannot be disabled"):
        load_plugins(PluginPolicy(disabled=("builtin",)))


def test_required_plugin_that_cannot_be_used_is_an_error(site: FakeSite) -> None:
    site.add("kvframe-bad", "bad", "import no_such_library")
    reason = "broken: importing kvframe_bad.manifest_bad failed"
    with pytest.raises(PluginError) as caught:
        load_plugins(PluginPolicy(required=("bad",), source="my.toml"))
    assert str(caught.value).startswith(f"plugin kvframe-bad:bad cannot be used, and my.toml requires it: {reason}")


def test_required_plugin_that_is_not_installed_is_an_error(site: FakeSite) -> None:
    add_good(site)
    with pytest.raises(PluginError, match=r"plugins\.required: .*'zz_godo'.*did you mean 'zz_good'\?"):
        load_plugins(PluginPolicy(required=("zz_godo",)))


@pytest.mark.parametrize("group", ["kvframe.v1s", "kvframe-v1", "kvfrmae.v1", "kvframe.plugins", "kvframe"])
def test_plugin_in_a_group_that_kvframe_does_not_read_is_named_where_it_is_asked_for(
    group: str, site: FakeSite
) -> None:
    site.add("kvframe-mine", "mine", group=group, api=None)
    says = f"kvframe-mine lists entry points in the group '{group}', which kvframe does not read: a plugin is listed in"
    assert [says] == [sentence[: len(says)] for sentence in find_misnamed()]
    host = load_plugins()
    with pytest.raises(UnknownNameError, match=re.escape(says)):
        host.record("mine")
    for policy in (PluginPolicy(required=("mine",)), PluginPolicy(disabled=("mine",))):
        with pytest.raises(KVFrameError, match=re.escape(says)):
            load_plugins(policy)


def test_group_of_versions_that_is_misspelt_is_named_beside_the_refusal(site: FakeSite) -> None:
    site.add("kvframe-mine", "mine", api=None)
    site.write_metadata("kvframe-mine", "[kvframe.v1.apis]\nmine = v1_0")
    (sentence,) = find_misnamed()
    assert "'kvframe.v1.apis', which kvframe does not read" in sentence


def test_distribution_of_that_name_without_a_plugin_is_named(site: FakeSite) -> None:
    site.write_metadata("kvframe-mine", "[console_scripts]\nmine = mine:main")
    assert [] == find_misnamed()
    with pytest.raises(UnknownNameError, match=r"kvframe-mine is installed, and has no entry point in the group 'kvf"):
        load_plugins().record("mine")


def test_groups_of_others_and_of_kvframes_hosts_are_no_mistakes(site: FakeSite) -> None:
    site.write_metadata("acme", "[acme.v1]\nx = y\n[pytest11]\nx = y\n[kvframe.commands]\nx = y\n[kvframe.answers]")
    site.add("acme-good", "good")
    site.write_metadata("acme-good", "[kvframe_acme.things]\nx = y")
    assert [] == find_misnamed()


def test_required_plugin_that_loads_is_fine(site: FakeSite) -> None:
    add_good(site)
    assert load_plugins(PluginPolicy(required=("zz_good",))).record("zz_good").status == "loaded"


# --- settings --------------------------------------------------------------------------------------------------------

TAKES_SETTINGS = MANIFEST + "seen = []\n@hookimpl\ndef kvframe_configure(settings): seen.append(settings)\n"


@pytest.mark.parametrize("name", ["set", "kvframe-set:set"])
def test_plugin_is_given_its_own_table(site: FakeSite, name: str) -> None:
    module = site.add("kvframe-set", "set", TAKES_SETTINGS)
    load_plugins(PluginPolicy(settings={name: {"tile": 64}}))
    assert sys.modules[module].seen == [{"tile": 64}]


def test_plugin_without_a_table_is_given_an_empty_one(site: FakeSite) -> None:
    module = site.add("kvframe-set", "set", TAKES_SETTINGS)
    load_plugins()
    assert sys.modules[module].seen == [{}]


def test_settings_for_a_plugin_that_takes_none_are_refused(site: FakeSite) -> None:
    add_good(site)
    with pytest.raises(StackError, match=r"plugin\.zz_good: plugin kvframe-zz-good:zz_good takes no settings"):
        load_plugins(PluginPolicy(settings={"zz_good": {"tile": 64}}))


def test_settings_for_a_plugin_that_is_not_installed_are_refused(site: FakeSite) -> None:
    add_good(site)
    with pytest.raises(StackError, match=r"plugin\.zz_godo: .*did you mean 'zz_good'\?"):
        load_plugins(PluginPolicy(settings={"zz_godo": {}}))


def test_plugin_that_refuses_its_settings_is_broken(site: FakeSite) -> None:
    site.add(
        "kvframe-set", "set", MANIFEST + "@hookimpl\ndef kvframe_configure(settings): raise ValueError('no key tyle')\n"
    )
    record = load_plugins(PluginPolicy(settings={"set": {"tyle": 1}})).record("set")
    assert (record.status, record.reason) == ("broken", "kvframe_configure failed: ValueError: no key tyle")


# --- plugins passed as modules ---------------------------------------------------------------------------------------


def make_module() -> ModuleType:
    return plugin("my_notebook", backends={"mine": "my_notebook:Mine"})


def test_hand_made_module_is_a_plugin(site: FakeSite) -> None:
    host = load_plugins(plugins=[make_module()])
    assert host.record("my_notebook").status == "loaded"
    assert host.registry.backends.get("mine").owner == "my_notebook"


def test_module_may_be_passed_twice(site: FakeSite) -> None:
    module = make_module()
    assert len(load_plugins(plugins=[module, module]).records) == 2


def test_module_that_is_also_installed_is_taken_once(site: FakeSite) -> None:
    name = site.add("kvframe-good", "good", GOOD)
    load_plugins()
    assert statuses(load_plugins(plugins=[sys.modules[name]])) == {
        "kvframe:builtin": "loaded",
        "kvframe-good:good": "loaded",
    }


def test_passed_module_that_cannot_be_used_is_an_error(site: FakeSite) -> None:
    with pytest.raises(PluginError, match="plugin empty:empty cannot be used, and it was passed as a module: broken"):
        load_plugins(plugins=[ModuleType("empty")])


def test_passed_module_can_be_disabled(site: FakeSite) -> None:
    host = load_plugins(PluginPolicy(disabled=("my_notebook",)), [make_module()])
    assert host.record("my_notebook").status == "disabled"


@pytest.mark.parametrize("plugin", ["my_notebook", {}])
def test_a_value_that_is_no_module_is_refused(site: FakeSite, plugin: Any) -> None:
    with pytest.raises(PluginError, match=r"plugins=\[\.\.\.\] takes modules with kvframe hooks, not "):
        load_plugins(plugins=[plugin])


def test_marker_with_another_hooks_name_is_honoured(site: FakeSite) -> None:
    manifest = "@hookimpl(specname='kvframe_register_backends')\ndef give(register): register('given', 'a:B')\n"
    site.add("kvframe-alias", "alias", MANIFEST + manifest)
    assert "given" in load_plugins().registry.backends


# --- the contract itself ---------------------------------------------------------------------------------------------

HOOKS = sorted(name for name in vars(hookspecs.HookSpecs) if name.startswith("kvframe_"))


def test_the_hooks_of_version_1_0_are_there() -> None:
    assert hookspecs.API_VERSION == "1.0"
    assert HOOKS == [
        "kvframe_configure",
        "kvframe_register_backends",
        "kvframe_register_event_publishers",
        "kvframe_register_eviction_policies",
        "kvframe_register_formats",
        "kvframe_register_logits_processors",
        "kvframe_register_model_adapters",
        "kvframe_register_page_stores",
        "kvframe_register_proposers",
        "kvframe_register_scheduling_policies",
        "kvframe_register_specs",
        "kvframe_register_wrappers",
    ]
