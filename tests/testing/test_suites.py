"""The test classes of the kit: an author names a part, and pytest runs a test for each check."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from tests.programs import IMPORTED, run_program

TESTS = """
    from kvframe_testing.suites import (
        BackendTests,
        EvictionTests,
        FormatTests,
        SpecTests,
        WrapperTests,
    )
    from kvframe_engine.testing.suites import AdapterTests, ProposerTests


"""


def run(folder: Path, source: str, *arguments: str) -> tuple[int, str]:
    """Run pytest on test classes, in a folder without any settings; return the exit code and the output."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\nfilterwarnings = error\n")
    (folder / "test_mine.py").write_text(dedent(TESTS) + dedent(source))
    process = run_program("-m", "pytest", "-p", "no:cacheprovider", "-q", *IMPORTED, *arguments, cwd=folder)
    return process.returncode, process.stdout


def test_each_check_of_each_kind_is_a_test(tmp_path: Path) -> None:
    code, output = run(
        tmp_path,
        """
        class TestWindow(SpecTests):
            spec = "sliding_window"
            options = [{"window": 3}]
            block_sizes = (4,)

        class TestPolicy(EvictionTests):
            policy = "scan_resistant"

        class TestDrafts(ProposerTests):
            proposer = "ngram"
            options = {"max_match": 3}

        class TestBytes(FormatTests):
            format = "int8_token_head"

        class TestDecodes(WrapperTests):
            wrapper = "decode_only"

        class TestMine(BackendTests):
            backend = "torch"
        """,
        "--collect-only",
    )
    assert code == 0, output
    for test in (
        "TestWindow::test_conformance[forgetting-window=3-block=4]",
        "TestWindow::test_conformance[torch-window=3-block=4-mixed]",
        "TestPolicy::test_conformance[pool=4096-shares=0]",
        "TestDrafts::test_conformance[max_drafts=5]",
        "TestBytes::test_conformance[rounding-bfloat16-sizes=2_2]",
        "TestDecodes::test_conformance[declared-full-sharing_a_cache]",
        "TestMine::test_conformance[run-",
    ):
        assert f"test_mine.py::{test}" in output


WRONG = """
    import attrs
    from kvframe.contract import AttentionSpec

    @attrs.frozen(kw_only=True)
    class Returning(AttentionSpec):
        kind = "returning"

        def live_ranges(self, n):
            return ((0, n),) if n % 2 else ()

    class TestReturning(SpecTests):
        spec = Returning
        block_sizes = (4,)
"""


def test_what_is_wrong_fails_with_the_sentence_of_the_kit(tmp_path: Path) -> None:
    code, output = run(tmp_path, WRONG, "-k", "forgetting or past")
    assert (1, 1) == (code, output.count("1 failed, 1 passed")), output
    assert "ConformanceError: Returning(" in output
    assert "law of forgetting: tokens [0, 1] are live at 3 and were not at 2" in output


NOTHING = """
    class TestNoCase(BackendTests):
        backend = "torch"
        device = "mps"

    class TestNoSpec(SpecTests):
        spec = "nothing"

    class TestNoModel(AdapterTests):
        adapter = "transformers"

    class TestNothingKept(BackendTests):
        backend = "torch"
        keeps = lambda *_: False
"""


def test_a_class_without_a_check_is_an_error(tmp_path: Path) -> None:
    code, output = run(tmp_path, NOTHING)
    assert (2, 1) == (code, output.count("4 errors in")), output
    for name, message in (
        ("TestNoCase", "no case at all"),
        ("TestNoSpec", "there is no cache spec named 'nothing'"),
        ("TestNoModel", "override make_model"),
        ("TestNothingKept", "is left to check"),
    ):
        assert f"ERROR test_mine.py::{name} - " in output
        assert message in output


def test_the_rest_of_the_checks_is_run_if_it_is_asked_for(tmp_path: Path) -> None:
    source = """
        class TestWindow(SpecTests):
            spec = "sliding_window"
            options = [{"window": 3}]
            block_sizes = (4,)
    """
    usual = run(tmp_path, source, "--collect-only")[1]
    code, rest = run(tmp_path, source, "--collect-only", "-m", "whole")
    assert ("-mixed]" in usual, "-decodes]" in usual, code) == (True, False, 0)
    assert ("-mixed]" in rest, "-decodes]" in rest) == (False, True)
