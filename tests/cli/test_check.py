"""``kvframe check``: what works, what is refused, what is wrong, and the command that shows it again."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import attrs
import pytest
from click.testing import CliRunner, Result
from kvframe_testing.checks import Check, Checks, run_checks
from kvframe_testing.laws import ConformanceError

from kvframe.cli import main
from kvframe.loading import plugins
from kvframe.loading.plugins import PluginRecord, load_plugins

BACKEND = """
    import torch

    from kvframe.contract import AttentionBackend, Capabilities, hookimpl


    class Sums(AttentionBackend):
        capabilities = Capabilities(
            devices={"cpu"}, dtypes={"float32"}, masks={"causal", "bidirectional"}, sinks=True, preference=-1
        )

        def attend(self, layer, query, kv_cache, metadata, *, sinks=None, **_):
            output = torch.zeros_like(query)
            group_size = layer.query.num_heads // layer.spec.num_kv_heads
            causal = metadata.causal and layer.spec.mask.causal
            starts, table = metadata.query_start_loc.tolist(), metadata.block_table
            for request, seq_len in enumerate(metadata.seq_lens.tolist()):
                for row in range(starts[request], starts[request + 1]):
                    last = seq_len - starts[request + 1] + row + 1 if causal else seq_len
                    tokens = torch.arange(last)
                    pages = table[request, tokens // metadata.block_size]
                    keys, values = (kv_cache[name][pages, tokens % metadata.block_size] for name in ("k", "v"))
                    keys, values = (each.repeat_interleave(group_size, dim=1) for each in (keys, values))
                    scores = torch.einsum("hd,thd->ht", query[row], keys) * layer.query.scale
                    if SINKS and sinks is not None:
                        scores = torch.cat([scores, sinks[:, None]], dim=1)
                    weights = scores.softmax(-1)[:, : len(tokens)]
                    output[row] = torch.einsum("ht,thd->hd", weights, values)
            return RESULT


    @hookimpl
    def kvframe_register_backends(register):
        register("sums", Sums)
"""

SPEC = """
    import attrs

    from kvframe.contract import AttentionSpec, hookimpl, positive_int


    @attrs.frozen(kw_only=True)
    class Anchors(AttentionSpec):
        kind = "anchors"
        every: int = positive_int

        def live_ranges(self, n):
            return RANGES


    @hookimpl
    def kvframe_register_specs(register):
        register("anchors", Anchors)
"""
KEEPS = "tuple((each, each + 1) for each in range(0, n, self.every))"
"""Every so many tokens one stays."""
RETURNS = "((0, n),) if n and n % self.every == 0 else ()"
"""A token that was not live becomes live again."""

WRAPPER = """
    import attrs
    import numpy as np
    import torch

    from kvframe.contract import FieldUse, MetadataWrapper, hookimpl

    CARRIED = ("num_actual_tokens", "max_query_len", "max_seq_len", "slot_mapping", "block_size", "num_generating",
               "generating_indices", "generating_indices_cpu", "causal", "exact_lens", "num_reqs", "query_start_loc",
               "query_start_loc_cpu", "static_shapes", "seq_lens", "seq_lens_cpu")


    @attrs.frozen(kw_only=True)
    class Turned(MetadataWrapper):
        name = "turned"
        fields = {**dict.fromkeys(CARRIED, FieldUse.CARRY), "block_table": FieldUse.SLICE}

        def __call__(self, metadata):
            return attrs.evolve(metadata, block_table=TABLE)


    @hookimpl
    def kvframe_register_wrappers(register):
        register("turned", Turned)
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name.startswith("author_of"):
            del sys.modules[name]


@pytest.fixture
def plugin(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    def write(source: str, **parts: str) -> Path:
        path = tmp_path / f"author_of_{abs(hash(request.node.name))}.py"
        text = dedent(source)
        for name, part in parts.items():
            assert name in text
            text = text.replace(name, part)
        path.write_text(text)
        return path

    return write


def found(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and what is said of the only part."""
    result = run(*arguments, "--json")
    (part,) = json.loads(result.stdout)["parts"]
    return result.exit_code, part


def verdicts(part: dict[str, Any]) -> dict[str, str]:
    return {row["feature"]: row["words"] for row in part["features"]}


def check_reproduced(part: dict[str, Any]) -> None:
    """Run the command that is printed for the first failure: the same check fails, and no other runs."""
    words = shlex.split(part["failure"]["command"])
    assert ["kvframe", "check"] == words[:2]
    code, again = found(*words[2:])
    assert (1, "wrong", 1, 0) == (code, again["verdict"], again["num_checks"], again["num_passed"])
    assert part["failure"] == again["failure"]


def test_a_backend_that_works_is_shown_with_what_it_refuses(plugin: Any) -> None:
    code, part = found(plugin(BACKEND, SINKS="True", RESULT="output"))
    assert (0, "works", None) == (code, part["verdict"], part["failure"])
    assert 30 < part["num_checks"] == part["num_passed"]
    rows = verdicts(part)
    assert {"works"} == {rows[each] for each in ("full attention", "bidirectional", "learned sinks", "another host")}
    assert ("refused: mask_window", "refused: soft_cap") == (rows["windows"], rows["soft cap"])
    assert ("refused: dtype", "refused: lse") == (rows["float64"], rows["log-sum-exp"])


def test_a_backend_that_returns_none_is_wrong_in_everything(plugin: Any) -> None:
    code, part = found(plugin(BACKEND, SINKS="True", RESULT="None"))
    assert (1, "wrong", 0) == (code, part["verdict"], part["num_passed"])
    assert {"wrong"} == {words for words in verdicts(part).values() if not words.startswith("refused")}
    assert "attend returns NoneType, not torch.Tensor" in part["failure"]["sentence"]
    check_reproduced(part)


def test_an_exception_comes_with_its_file_and_line(plugin: Any) -> None:
    path = plugin(BACKEND, SINKS="True", RESULT="output.no_such_name")
    line = 1 + path.read_text().splitlines().index("        return output.no_such_name")
    assert f"{path}:{line}" == found(path)[1]["failure"]["source"]


def test_a_wrong_result_comes_with_the_line_of_the_class(plugin: Any) -> None:
    path = plugin(BACKEND, SINKS="True", RESULT="None")
    line = 1 + path.read_text().splitlines().index("class Sums(AttentionBackend):")
    assert f"See: {path}:{line}" in run(path).stdout


def test_options_that_no_stack_can_give_are_wrong(plugin: Any) -> None:
    path = plugin(BACKEND, SINKS="True", RESULT="output")
    source = path.read_text()
    made = "attrs.make_class('Changing', ['size'])"
    path.write_text(
        "import attrs\n" + source.replace("    def attend", f"    options_class = {made}\n\n    def attend", 1)
    )
    code, part = found(path, "--only", "options")
    assert (1, "wrong") == (code, part["verdict"])
    assert "its options cannot be made with conformance_options: 'size' must be given" in part["failure"]["sentence"]


def test_options_of_no_attrs_class_are_refused_at_once(plugin: Any) -> None:
    path = plugin(BACKEND, SINKS="True", RESULT="output")
    path.write_text(path.read_text().replace("    def attend", "    options_class = dict\n\n    def attend", 1))
    code, part = found(path, "--only", "options")
    assert (2, "not checked") == (code, part["verdict"])
    assert "declares options_class = <class 'dict'>, which is not an attrs class" in part["reason"]


def test_a_backend_that_ignores_sinks_is_wrong_in_these_alone(plugin: Any) -> None:
    code, part = found(plugin(BACKEND, SINKS="False", RESULT="output"))
    assert (1, "wrong") == (code, part["verdict"])
    rows = verdicts(part)
    assert ["learned sinks"] == [feature for feature, words in rows.items() if words == "wrong"]
    assert "works, but not: learned sinks" == rows["full attention"]
    assert "queries are wrong" in part["failure"]["sentence"]
    check_reproduced(part)


def test_a_spec_that_breaks_the_law_of_forgetting_is_wrong_in_that_law(plugin: Any) -> None:
    code, part = found(plugin(SPEC, RANGES=RETURNS))
    assert (1, "wrong") == (code, part["verdict"])
    assert "wrong" == verdicts(part)["law: forgetting"]
    assert "works" == verdicts(part)["law: past"]
    assert "law of forgetting: tokens [" in part["failure"]["sentence"]
    check_reproduced(part)


def test_a_spec_that_keeps_the_laws_is_computed_by_the_backends_that_read_live_ranges(plugin: Any) -> None:
    code, part = found(plugin(SPEC, RANGES=KEEPS), "--options", '{"every": 3}')
    assert (0, "works") == (code, part["verdict"])
    assert "works" == verdicts(part)["attention by torch_reference"]
    assert "refused: mask_live_range" == verdicts(part)["attention by torch"]


def test_a_wrapper_that_forgets_a_row_is_wrong(plugin: Any) -> None:
    code, part = found(plugin(WRAPPER, TABLE="metadata.block_table[:1].expand_as(metadata.block_table)"))
    assert (1, "wrong", "wrong") == (code, part["verdict"], verdicts(part)["full"])
    check_reproduced(part)


@pytest.mark.whole
def test_a_wrapper_that_changes_nothing_works(plugin: Any) -> None:
    code, part = found(plugin(WRAPPER, TABLE="metadata.block_table.clone()"))
    assert (0, "works") == (code, part["verdict"]), part["failure"]


# --- what is printed --------------------------------------------------------------------------------------------------


def test_the_matrix_is_readable_in_80_columns_and_ends_with_the_command(plugin: Any) -> None:
    result = run(plugin(BACKEND, SINKS="False", RESULT="output"))
    lines = result.stdout.splitlines()
    assert 80 >= max(len(line) for line in lines if not line.startswith(("Run it again: ", "See: ")))
    assert "checks passed" in lines[0]
    assert any(line.split()[:5] == ["learned", "sinks", "wrong", "0", "of"] for line in lines)
    (command,) = (line for line in lines if line.startswith("Run it again: kvframe check "))
    assert "--kind backend --only " in command


def test_a_page_store_is_checked_with_its_options(tmp_path: Path) -> None:
    options = json.dumps({"path": str(tmp_path), "size": "1MiB"})
    code, part = found("disk", "--options", options)
    assert (0, "works", None) == (code, part["verdict"], part["failure"])
    assert {"works"} == {feature["verdict"] for feature in part["features"]}
    code, part = found("disk", "--options", options, "--only", "size=512")
    assert (0, 1) == (code, part["num_checks"])
    code, part = found("disk")
    assert (2, "not checked") == (code, part["verdict"])
    assert "'path', 'size' must be given" in part["reason"]


@pytest.mark.parametrize("name", ["scan_resistant", "ngram", "encoder_only"])
def test_installed_parts_of_every_small_kind_work(name: str) -> None:
    code, part = found(name)
    assert (0, "works", None) == (code, part["verdict"], part["failure"])


def test_a_plugin_is_checked_with_all_that_it_registers() -> None:
    result = run("kvframe-chunked-local", "--only", "past-chunk=5-block=4", "--kind", "spec")
    assert (0, 1) == (result.exit_code, result.stdout.count("1 of 1 checks passed")), result.output


def test_kinds_of_one_name_are_checked_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvframe_testing.commands.check._check_part", lambda asked, entry, *_: {"verdict": "works", "kind": entry.kind}
    )
    parts = json.loads(run("chunked_local", "--json").stdout)["parts"]
    assert ["spec", "wrapper"] == [part["kind"] for part in parts]


# --- what cannot be checked -------------------------------------------------------------------------------------------


def test_a_part_that_is_not_installed_is_not_passed() -> None:
    code, part = found("flashinfer")
    assert (2, "not checked") == (code, part["verdict"])
    assert "flashinfer" in part["reason"]


def test_an_event_publisher_is_checked(tmp_path: Path) -> None:
    code, part = found("zmq", "--kind", "event_publisher", "--options", json.dumps({"endpoint": f"ipc://{tmp_path}/e"}))
    assert (0, "works", 3) == (code, part["verdict"], part["num_passed"])
    code, part = found("zmq")
    assert (2, "not checked") == (code, part["verdict"])
    assert "cannot be made with {}" in part["reason"]


def test_a_plugin_that_was_set_aside_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    host = load_plugins()
    broken = PluginRecord(
        name="mine", distribution="kvframe-mine", version="1", api_version="1.0", status="broken", reason="it fails"
    )
    monkeypatch.setattr(plugins, "load_plugins", lambda **_: attrs.evolve(host, records=(*host.records, broken)))
    for name, end in (
        ("kvframe-mine", "plugin kvframe-mine:mine was set aside, so it cannot be checked: broken: it fails"),
        ("mine_too", "plugins set aside: kvframe-mine:mine (broken: it fails)"),
    ):
        result = run(name)
        assert (2, "") == (result.exit_code, result.stdout)
        assert end in result.stderr


def test_a_backend_without_a_case_is_not_passed(plugin: Any) -> None:
    path = plugin(BACKEND, SINKS="True", RESULT="output")
    path.write_text(path.read_text().replace('masks={"causal", "bidirectional"}', "masks={'chunk'}"))
    code, part = found(path)
    assert (2, "not checked") == (code, part["verdict"])
    assert "no case at all" in part["reason"]


def test_nothing_to_check_is_an_error() -> None:
    with pytest.raises(ConformanceError, match=r"backend 'a': there is nothing to check: .*\(mask_chunk\)"):
        Checks(part="backend 'a'", checks=(), refused={"chunks": ("mask_chunk",)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sliding_windows"], "there is no plugin, registered name or module named 'sliding_windows'"),
        (["sliding_windows"], "did you mean 'sliding_window'?"),
        (["nowhere/mine.py"], "there is no file nowhere/mine.py"),
        (["sliding_window", "--kind", "backend"], "there is no kind named 'backend'; known: spec"),
        (["sliding_window", "--options", "{"], "--options must be a JSON object"),
        (["sliding_window", "--options", "[1]"], "--options must be a JSON object"),
        (["sliding_window", "--only", "full-*"], "there is no check named 'full-*'"),
    ],
)
def test_mistakes_are_said_in_one_sentence(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (2, "") == (result.exit_code, result.stdout)
    assert message in result.stderr


def test_options_that_the_part_refuses_are_named() -> None:
    code, part = found("sliding_window", "--options", '{"window": 0}')
    assert (2, "not checked") == (code, part["verdict"])
    assert "window must be a whole number of at least 1" in part["reason"]


def test_a_spec_with_an_option_that_is_no_number_says_which_and_how_to_give_it(plugin: Any) -> None:
    source = """
        import attrs

        from kvframe.contract import AttentionSpec, hookimpl


        @attrs.frozen(kw_only=True)
        class Moded(AttentionSpec):
            kind = "moded"
            mode: str

            def live_ranges(self, n):
                return ((0, n),) if n else ()


        @hookimpl
        def kvframe_register_specs(register):
            register("moded", Moded)
    """
    path = plugin(source)
    _, part = found(path)
    assert "cache spec 'moded' needs 'mode', and the kit has values for whole numbers only" in part["reason"]
    assert "--options '{\"mode\": …}'" in part["reason"]
    code, part = found(path, "--options", '{"mode": "fast"}')
    assert (0, "works") == (code, part["verdict"])


def test_a_spec_whose_options_cannot_be_guessed_asks_for_them() -> None:
    code, part = found("mamba")
    assert (2, "not checked") == (code, part["verdict"])
    assert "give other options" in part["reason"]


# --- verdicts ---------------------------------------------------------------------------------------------------------


def judged(*checks: tuple[str, bool]) -> dict[str, str]:
    """Return the verdicts after checks, each with its features and whether it passes."""

    def run_one(passes: bool) -> None:
        if not passes:
            raise ConformanceError("wrong")

    made = [
        Check(name=str(index), features=tuple(features), run=lambda passes=passes: run_one(passes))  # type: ignore[misc]
        for index, (features, passes) in enumerate(checks)
    ]
    return {row.feature: str(row) for row in run_checks(Checks(part="a part", checks=tuple(made))).rows}


def test_the_fewest_features_that_explain_the_failures_are_wrong() -> None:
    assert {"a": "works, but not: b", "b": "wrong", "c": "works, but not: b"} == judged(
        ("a", True), ("ab", False), ("ac", True), ("abc", False)
    )
    assert {"a": "works", "b": "works"} == judged(("a", True), ("b", True))
    assert {"a": "wrong", "b": "wrong"} == judged(("ab", False), ("ab", False))


def test_a_feature_that_fails_at_times_is_wrong_if_no_other_explains_it() -> None:
    assert {"a": "wrong", "b": "works, but not: a"} == judged(("ab", True), ("ab", False), ("b", True))


def test_any_exception_of_a_part_is_a_failure() -> None:
    def fail() -> None:
        raise ZeroDivisionError("by zero")

    report = run_checks(Checks(part="a part", checks=(Check(name="x", features=("a",), run=fail),)))
    assert {"x": "a part on x: ZeroDivisionError: by zero"} == dict(report.failures)
