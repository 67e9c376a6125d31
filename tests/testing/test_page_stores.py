"""The kit finds every bug of a list in page stores, and none in a store without one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from kvframe_testing import page_stores
from kvframe_testing.checks import run_checks
from kvframe_testing.laws import ConformanceError
from kvframe_testing.page_stores import LARGE_BOUND, NO_BOUND, OWN_PROCESS, check_page_store, page_store_checks

from kvframe.contract import PageStore
from tests.testing import wrong_page_stores as wrong
from tests.testing.wrong_page_stores import Folder, OpenFolder

MISTAKES: dict[type[OpenFolder], tuple[str, str]] = {
    wrong.FindsAll: ("unknown", "honest: find() finds keys that were never written"),
    wrong.FindsAsASet: ("unknown", "form: find() of 8 keys has to return as many times True or False"),
    wrong.FindsAsBefore: ("forget", "honest: find() finds forgotten keys"),
    wrong.FailsForNothing: ("empty", "form: read() failed: ValueError: "),
    wrong.FailsForUnknown: ("unknown", "form: forget() failed: FileNotFoundError: "),
    wrong.FailsForDuplicates: ("duplicates", "form: write() failed: FileExistsError: "),
    wrong.CountsItsOwn: ("duplicates", "honest: write() says 0 keys have a record, and find() finds 8"),
    wrong.ReturnsNoCount: ("empty", "form: write() of 0 keys has to return a number up to that, not None"),
    wrong.KeepsNothing: ("size=512", "useful: of 8 records of 512 bytes, 0 are kept"),
    wrong.KeepsOneOfFour: ("many", "useful: of 1024 records of 512 bytes, "),
    wrong.ForgetsNothing: ("forget", "honest: find() finds forgotten keys"),
    wrong.ForgetsForItself: ("forget", "honest: find() finds forgotten keys when the store is opened again"),
    wrong.ClosesForEver: ("reopen", "useful: of 8 records, a store opened again has 0"),
    wrong.AnySize: ("other-sizes", "whole: a record of 512 bytes is read to a buffer of 1"),
    wrong.Text: ("contents", "whole: a record of bytes like b'\\x00\\x00\\x00' is read with others"),
    wrong.ShortKeys: ("similar-keys", "whole: a record of 512 bytes is read with other bytes beside similar keys"),
    wrong.FewLetters: ("similar-keys", "whole: a record of 512 bytes is read with other bytes beside similar keys"),
    wrong.InOrder: ("size=512", "whole: a record of 512 bytes is read with other bytes"),
    wrong.EndsEarly: ("size=65536", "whole: a record of 65,536 bytes is read with other bytes after it was written"),
    wrong.KeepsViews: ("copies", "whole: a record of 4,097 bytes is read with other bytes after the buffers changed"),
    wrong.ReadsLater: ("late", "whole: a buffer does not have its record when read() returns"),
    wrong.ReadsTwice: ("late", "copies: a buffer changes after read() has returned"),
    wrong.MixesOldAndNew: ("written-again", "whole: a record that was written again is read with bytes of both"),
    wrong.KeepsAll: ("bound", "bound: 64 records of 131,072 bytes are found in 4,194,304 bytes"),
    wrong.RefusesIfFull: ("bound", "bound: a full store keeps no new records"),
    wrong.FailsIfLarge: ("bound", "form: write() failed: ValueError: a record is too large"),
    wrong.InParts: ("processes", "whole: a record is read with other bytes while two processes write it"),
    wrong.OneDraft: ("processes", "whole: a record is read with other bytes while two processes write it"),
    wrong.InPartsUnderALock: ("killed=30", "after its writer was killed"),
    wrong.LockFile: ("killed=30", "form: write() failed: TimeoutError: another process writes"),
}
"""The check that finds each mistake, and what it says."""

DECLARATIONS: dict[type[Folder], str] = {
    wrong.DifferentThoughEqual: "form: two stores with the same options differ",
    wrong.ListAsOption: "form: a store is a frozen value",
    wrong.NoSize: "form: capacity has to be a number of bytes or None, not 0",
    wrong.ShortSecret: "form: local_secret() has to return 32 bytes or None",
    wrong.OtherSecret: "form: local_secret() returns another secret",
    wrong.OpensNothing: "form: open() has to return an OpenPageStore, not {}",
    wrong.OnlyInTheMainThread: "form: open() failed: ValueError: signal only works in main thread",
}
"""What the kit says of each store that declares or opens something wrong."""


def test_nothing_is_found_in_a_store_without_a_mistake(tmp_path: Path) -> None:
    report = run_checks(page_store_checks(Folder, {"path": str(tmp_path)}))
    assert {} == report.failures
    assert {"works"} == {row.verdict for row in report.rows}
    check_page_store(Folder(path=str(tmp_path)))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_the_kit_finds_a_mistake_in_an_open_store(mistake: type[OpenFolder], tmp_path: Path) -> None:
    check, message = MISTAKES[mistake]
    store_class = getattr(wrong, f"Folder{mistake.__name__}")
    report = run_checks(page_store_checks(store_class, {"path": str(tmp_path)}).only(check))
    assert message in report.failures[check]


@pytest.mark.parametrize("mistake", DECLARATIONS, ids=lambda mistake: mistake.__name__)
def test_the_kit_finds_a_mistake_in_a_store(mistake: type[Folder], tmp_path: Path) -> None:
    with pytest.raises(ConformanceError, match=re.escape(DECLARATIONS[mistake])):
        run_first(mistake, path=str(tmp_path))


def test_a_store_that_is_stuck_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_stores, "_LONGEST_SECONDS", 0.05)
    check = page_store_checks(wrong.Slow, {"path": str(tmp_path)}).only("size=512").checks[0]
    with pytest.raises(ConformanceError, match="useful: the store has not answered for 0 seconds"):
        check.run()


def run_first(store_class: type[PageStore], **options: Any) -> None:
    """Run the checks of what a store declares."""
    for check in page_store_checks(store_class, options).checks[:3]:
        check.run()


def refused(store_class: type[PageStore], *checks: str, **options: Any) -> list[str | None]:
    """Return the codes with which checks are refused."""
    return [page_store_checks(store_class, options).only(check).checks[0].run() for check in checks]


def test_what_is_not_checked_is_said(tmp_path: Path) -> None:
    assert [NO_BOUND] == refused(wrong.Unbounded, "bound", path=str(tmp_path))
    assert [LARGE_BOUND] == refused(Folder, "bound", path=str(tmp_path), size=2**40)
    assert [NO_BOUND, OWN_PROCESS] == refused(wrong.InMemory, "bound", "processes")


def test_a_store_that_no_other_process_can_have_is_wrong() -> None:
    @attrs.frozen(kw_only=True)
    class Local(wrong.InMemory):
        pass

    with pytest.raises(ConformanceError, match="form: the store cannot be given to another process: "):
        refused(Local, "processes")


def test_a_store_that_opens_in_one_process_only_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConformanceError, match="failed in another process: RuntimeError: another process has it"):
        refused(wrong.OneProcess, "processes", path=str(tmp_path))
