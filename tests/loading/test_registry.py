"""The registry: the owner of a name, and the import, which happens only when the name is used."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path

import pytest

from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.contract.errors import ContestedNameError, PluginError, UnknownNameError
from kvframe.loading import packages
from kvframe.loading.claims import Claim
from kvframe.loading.packages import PROVIDERS, to_install
from kvframe.loading.plugins import PluginPolicy, load_plugins
from kvframe.loading.registry import Registry
from tests.loading.fake_distributions import MANIFEST, FakeSite, registers

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"

WINDOW_SPEC = """
import attrs
from kvframe.contract.specs import AttentionSpec

@attrs.frozen(kw_only=True)
class WindowSpec(AttentionSpec):
    kind = "my_window"
    def live_ranges(self, n):
        return ((0, n),) if n else ()
"""


def backend(name: str, owner: str, plugin: str = "p") -> Claim:
    return Claim("backend", name, f"{owner.replace('-', '_')}.backend:Backend", owner, f"{owner}:{plugin}")


def add_window(site: FakeSite, target: str, spec: str = WINDOW_SPEC, name: str = "my_window") -> Registry:
    site.add("kvframe-window", "window", registers("specs", (name, f"kvframe_window.{target}")), files={"spec": spec})
    return load_plugins().registry


# --- the owner of a name ----------------------------------------------------------------------------------------------


def test_name_that_one_plugin_claims_is_its_own() -> None:
    registry = Registry()
    registry.add([backend("fast", "kvframe-a")])
    assert registry.backends.get("fast").id == "kvframe-a:fast"
    assert registry.backends.names() == ("fast",)


def test_unknown_name_lists_the_known_names_and_the_nearest() -> None:
    registry = Registry()
    registry.add([backend("triton", "kvframe-a"), backend("flash_attn", "kvframe-a")])
    with pytest.raises(UnknownNameError) as caught:
        registry.backends.get("tritn")
    assert str(caught.value) == ("there is no backend named 'tritn'; known: flash_attn, triton; did you mean 'triton'?")


def test_unknown_name_says_which_plugins_were_set_aside(site: FakeSite) -> None:
    site.add("kvframe-bad", "bad", "import no_such_library")
    with pytest.raises(UnknownNameError, match=r"plugins set aside: kvframe-bad:bad \(broken: .*no_such_library"):
        load_plugins().registry.backends.get("fast")


def test_contested_name_has_no_owner(site: FakeSite) -> None:
    site.add("kvframe-a", "a", registers("backends", ("fast", "a:A"), ("only_a", "a:A")))
    site.add("kvframe-b", "b", registers("backends", ("fast", "b:B")))
    host = load_plugins()
    assert {host.record("a").status, host.record("b").status} == {"loaded"}
    assert host.registry.backends.names() == ("only_a", "torch_reference")
    assert host.registry.backends.contested() == {"fast": ("kvframe-a", "kvframe-b")}
    with pytest.raises(ContestedNameError) as caught:
        host.registry.backends.get("fast")
    assert str(caught.value) == (
        "backend 'fast' is claimed by kvframe-a and kvframe-b, so it belongs to none; choose with "
        '[plugins.owners.backend] fast = "kvframe-a" in the stack, or write "kvframe-a:fast"'
    )


def test_stack_chooses_the_owner_of_a_contested_name(site: FakeSite) -> None:
    site.add("kvframe-a", "a", registers("backends", ("fast", "a:A")))
    site.add("kvframe-b", "b", registers("backends", ("fast", "b:B")))
    registry = load_plugins(PluginPolicy(owners={"backend": {"fast": "kvframe_b"}})).registry
    assert registry.backends.get("fast").owner == "kvframe-b"
    assert registry.backends.contested() == {}


def test_owner_who_has_no_claim_owns_nothing() -> None:
    registry = Registry({"backend": {"fast": "kvframe-c"}})
    registry.add([backend("fast", "kvframe-a")])
    with pytest.raises(ContestedNameError, match="gives backend 'fast' to 'kvframe-c', which does not provide it"):
        registry.backends.get("fast")


def test_claim_is_reached_by_its_owner_even_if_contested() -> None:
    registry = Registry()
    registry.add([backend("fast", "kvframe-a")])
    registry.add([backend("fast", "kvframe-b")])
    assert registry.backends.get("kvframe-b:fast").owner == "kvframe-b"
    assert registry.backends.get("KVFrame_B:fast").owner == "kvframe-b"


def test_unknown_owner_of_a_name_lists_the_claims() -> None:
    registry = Registry()
    registry.add([backend("fast", "kvframe-a")])
    with pytest.raises(UnknownNameError, match="known: kvframe-a:fast; did you mean 'kvframe-a:fast'"):
        registry.backends.get("kvframe-c:fast")


def test_one_name_may_stand_for_things_of_two_kinds() -> None:
    registry = Registry()
    registry.add([backend("fast", "kvframe-a"), Claim("wrapper", "fast", "a:W", "kvframe-a", "kvframe-a:p")])
    assert registry.backends.get("fast").kind == "backend"
    assert registry.wrappers.get("fast").kind == "wrapper"


def test_one_distribution_cannot_claim_a_name_twice() -> None:
    registry = Registry()
    with pytest.raises(PluginError, match="backend 'fast' is registered already, by kvframe-a:p"):
        registry.add([backend("fast", "kvframe-a"), backend("fast", "kvframe-a", "q")])


def test_claims_of_one_plugin_are_kept_all_or_none() -> None:
    registry = Registry()
    with pytest.raises(PluginError):
        registry.add([backend("first", "kvframe-a"), backend("fast", "kvframe-a"), backend("fast", "kvframe-a")])
    assert registry.backends.names() == ()


# --- loading ---------------------------------------------------------------------------------------------------------


def test_target_is_imported_when_it_is_loaded_and_not_before(site: FakeSite) -> None:
    registry = add_window(site, "spec:WindowSpec")
    assert registry.specs.get("my_window").owner == "kvframe-window"
    assert "kvframe_window.spec" not in sys.modules
    assert registry.specs.load("my_window").__name__ == "WindowSpec"
    assert "kvframe_window.spec" in sys.modules


def test_class_may_be_registered_itself() -> None:
    registry = Registry()
    registry.add([Claim("spec", "full_attention", FullAttentionSpec, "my_notebook", "my_notebook:my_notebook")])
    assert registry.specs.load("full_attention") is FullAttentionSpec


@pytest.mark.parametrize(
    ("target", "spec", "cause"),
    [
        ("spec:WindowSpec", "import no_such_library", "importing 'kvframe_window.spec' failed: ModuleNotFoundError"),
        ("spec:WindowSpec", "raise SystemExit(3)", "importing 'kvframe_window.spec' failed: SystemExit: 3"),
        ("gone:WindowSpec", "", "importing 'kvframe_window.gone' failed: ModuleNotFoundError"),
        ("spec:WindowSpecs", WINDOW_SPEC, "looking for 'WindowSpecs' in 'kvframe_window.spec' failed: AttributeError"),
        ("spec:attrs", WINDOW_SPEC, "is not a subclass of kvframe.contract.specs.KVCacheSpec"),
        ("spec:AttentionSpec", WINDOW_SPEC, "does not implement live_ranges"),
        ("spec:WindowSpec", WINDOW_SPEC.replace("my_window", "other"), "has kind = 'other', not the registered name"),
    ],
)
def test_target_that_is_unfit_names_owner_name_and_cause(site: FakeSite, target: str, spec: str, cause: str) -> None:
    registry = add_window(site, target, spec)
    with pytest.raises(PluginError) as caught:
        registry.specs.load("my_window")
    assert str(caught.value).startswith("cache spec 'my_window' of kvframe-window cannot be used: ")
    assert cause in str(caught.value)


def test_missing_need_is_found_before_import_and_names_the_install_command(site: FakeSite) -> None:
    site.add(
        "kvframe-flash",
        "flash",
        MANIFEST
        + """
@hookimpl
def kvframe_register_backends(register):
    register("flash", "kvframe_flash.backend:Flash", needs="no_such_library", install="pip install 'flash[cuda]'")
""",
        files={"backend": "raise AssertionError"},
    )
    with pytest.raises(PluginError) as caught:
        load_plugins().registry.backends.load("flash")
    assert str(caught.value) == (
        "backend 'flash' of kvframe-flash cannot be used: needs no_such_library, not installed here; "
        "try: pip install 'flash[cuda]'"
    )
    assert "kvframe_flash.backend" not in sys.modules


def test_needs_may_be_several() -> None:
    claim = Claim("backend", "x", "a:B", "a", "a:a", needs=["attrs", "no_such_one.part", "no_such_two"])
    assert claim.missing() == ("no_such_one.part", "no_such_two")


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [
        *((version, False) for version in ("0.6.9", "0.6.10+cu130", "1.0", "0.7.0rc1", "nightly")),
        *((version, True) for version in ("0.6.8.post1", "0.6", "0.5.12")),
    ],
)
def test_a_library_that_is_too_old_is_found_before_import(
    version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"my-library": version}.__getitem__)
    claim = Claim("backend", "x", "a:B", "a", "a:a", install="pip install -U it", needs_versions="my-library>=0.6.9")
    assert is_refused is bool(claim.outdated())
    if is_refused:
        expected = (
            f"backend 'x' of a cannot be used: needs my-library>=0.6.9, not {version} as installed here; "
            "try: pip install -U it"
        )
        with pytest.raises(PluginError) as caught:
            claim.load()
        assert expected == str(caught.value)


def test_the_version_of_a_distribution_that_is_not_installed_is_not_checked() -> None:
    assert () == Claim("backend", "x", "a:B", "a", "a:a", needs_versions="no-such-library>=3").outdated()


def test_a_version_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(PluginError, match=r"backend 'x': needs_versions must be like 'name>=1.2', not 'library==2'"):
        Claim("backend", "x", "a:B", "a", "a:a", needs_versions="library==2")


def test_the_versions_that_plugins_ask_for_are_those_of_their_extras() -> None:
    version_needs, extras = set(), set()
    for claim in load_plugins().registry.backends.claims():
        if claim.needs_versions:
            version_needs.update((claim.owner, need) for need in claim.needs_versions)
            folder = PLUGINS / claim.owner.removeprefix("kvframe-").replace("-", "_")
            project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            needs = [need.partition(";")[0] for extra in project["optional-dependencies"].values() for need in extra]
            extras.update((claim.owner, need) for need in needs)
    assert {"kvframe-flash-attn", "kvframe-flashinfer", "kvframe-numba", "kvframe-triton"} == {
        owner for owner, _ in version_needs
    }
    assert extras == version_needs


def test_registered_names_load_their_classes() -> None:
    registry = load_plugins().registry
    assert registry.specs.load("full_attention") is FullAttentionSpec
    assert registry.backends.load("torch").__name__ == "TorchBackend"
    assert registry.backends.load("kvframe:torch_reference").__name__ == "TorchReferenceBackend"


# --- kvframe's own packages -------------------------------------------------------------------------------------------


def test_the_table_of_packages_equals_their_registrations() -> None:
    plugins = Path(__file__).resolve().parents[2] / "plugins"
    provided = {}
    for file in plugins.glob("*/pyproject.toml"):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        for kind, group in (("plugin", "kvframe.v1"), ("command", "kvframe.commands")):
            provided |= {(kind, name): project["name"] for name in project.get("entry-points", {}).get(group, ())}
    packages = set(provided.values())
    for kind, catalogue in load_plugins().registry.catalogues.items():
        provided |= {(kind, claim.name): claim.owner for claim in catalogue.claims() if claim.owner in packages}
    assert provided == PROVIDERS


@pytest.fixture
def no_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """kvframe runs from a folder without plugins beside it, as when it is installed from the index."""
    monkeypatch.setattr(packages, "_ROOT", tmp_path)


def test_what_to_type_in_a_clone_is_the_folder_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(PLUGINS.parent)
    assert "pip install -e plugins/serve" == to_install("kvframe-serve")
    assert "pip install -e plugins/kv_formats" == to_install("kvframe-kv-formats")
    monkeypatch.chdir(tmp_path)
    assert f"pip install -e {PLUGINS / 'serve'}" == to_install("kvframe-serve")
    assert "pip install kvframe-elsewhere" == to_install("kvframe-elsewhere")


def test_what_to_type_in_a_clone_has_the_folders_that_are_required_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PLUGINS.parent)
    monkeypatch.setattr(packages, "distributions", lambda name: [] if name.startswith("kvframe-") else [name])
    assert "pip install -e plugins/engine -e plugins/stores" == to_install("kvframe-engine")
    assert "pip install -e plugins/cpu -e plugins/triton -e kernels" == to_install("kvframe-cpu", "kvframe-triton")


@pytest.mark.usefixtures("no_clone")
def test_what_to_type_without_a_clone_is_the_name_of_the_package() -> None:
    assert "pip install kvframe-serve" == to_install("kvframe-serve")


@pytest.mark.usefixtures("no_clone")
def test_a_name_of_a_package_that_is_not_installed_names_the_package(site: FakeSite) -> None:
    registry = load_plugins().registry
    for catalogue, name, package in (
        (registry.specs, "mamba", "kvframe-mamba"),
        (registry.formats, "int4_token_head", "kvframe-kv-formats"),
        (registry.backends, "kvframe-flex:flex", "kvframe-flex"),
        (registry.backends, "torch", "kvframe-torch"),
    ):
        with pytest.raises(UnknownNameError, match=f"`pip install {package}` provides it"):
            catalogue.get(name)
    with pytest.raises(UnknownNameError) as caught:
        registry.backends.get("other:flex")
    assert "pip install" not in str(caught.value)


@pytest.mark.usefixtures("no_clone")
def test_a_required_plugin_that_is_not_installed_names_its_package(site: FakeSite) -> None:
    with pytest.raises(
        PluginError, match=r"no installed plugin named 'mamba'.*`pip install kvframe-mamba` provides it"
    ):
        load_plugins(PluginPolicy(required=("mamba",)))


def test_a_package_that_is_set_aside_need_not_be_installed(site: FakeSite) -> None:
    site.add("kvframe-mamba", "mamba", registers("specs", ("mamba", "a:B")))
    with pytest.raises(UnknownNameError) as caught:
        load_plugins(PluginPolicy(disabled=("mamba",))).registry.specs.get("mamba")
    assert "plugins set aside: kvframe-mamba:mamba (disabled" in str(caught.value)
    assert "pip install" not in str(caught.value)
