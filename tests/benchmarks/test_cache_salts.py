"""The benchmark of what times tell across salts: its statistic, and that it would notice a shared prefix."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.cache import salts
from kvframe.cache.manager import KVCacheManager
from tests.benchmarks.calling import page_of, record_of


def test_right_is_the_share_of_pairs_told_apart() -> None:
    chance = random.Random(3)
    first = [chance.choice(range(9)) for _ in range(50)]
    second = [chance.choice(range(7)) for _ in range(40)]
    pairs = [(a > b) + 0.5 * (a == b) for a in first for b in second]
    told = salts.tell_apart(first, second)
    assert pytest.approx(sum(pairs) / len(pairs)) == told.right
    assert told.low < told.right < told.high


def test_times_of_one_distribution_are_a_guess_and_others_are_not() -> None:
    chance = random.Random(3)
    draws = [[chance.gauss(mean, 1) for _ in range(3000)] for mean in (0, 0, 0.2, 3)]
    same, slightly, clearly = (salts.tell_apart(other, draws[0]) for other in draws[1:])
    assert (True, False, False) == (same.is_guessing, slightly.is_guessing, clearly.is_guessing)
    assert (False, False, True) == (same.is_telling, slightly.is_telling, clearly.is_telling)
    swapped = salts.tell_apart(draws[0], draws[3])
    assert swapped.is_telling
    assert salts.tell_apart([1.0] * 9, [1.0] * 9).right == 0.5


def test_few_times_are_no_proof() -> None:
    assert not salts.tell_apart([*range(20)], [*range(20)]).is_guessing


def test_each_kind_of_trial_comes_as_often_and_shares_no_object() -> None:
    chosen = salts.trials(10, 32, random.Random(1))
    for kind in salts.KINDS:
        of_kind = [trial for trial in chosen if trial.kind == kind]
        assert (3 if "my salt" in kind else 10) == len(of_kind)
        for trial in of_kind:
            assert ("same" in kind) == (trial.before == trial.mine)
            assert ("my salt" in kind) == (trial.salt == "mine")
            assert trial.before is not trial.mine


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_benchmark_notices_salts_that_share(is_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_shared:
        start = KVCacheManager.start
        monkeypatch.setattr(KVCacheManager, "start", lambda *args, salt, **options: start(*args, **options))
    found = salts.judged(
        "", salts.time_lookups(salts.trials(60, salts.LOOKUP_TOKENS, random.Random(1)), lambda _: None)
    )
    assert found["within"]["high"] < 0.3
    assert is_shared == (found["across"]["high"] < 0.3)
    assert not (is_shared and found["as_expected"])


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    arguments = ["--lookups", "3", "--requests", "2", "--results", str(tmp_path)]
    result = CliRunner().invoke(salts.main, arguments)
    # So few times prove nothing.
    assert 1 == result.exit_code, result.output
    record = record_of("cache_salts", tmp_path)
    assert ["lookup", "after", "beside"] == list(record["measured"])
    assert [3, 2, 2] == [len(each["nanoseconds"][salts.KINDS[0]]) for each in record["measured"].values()]
    page = page_of("cache_salts", tmp_path)
    assert 3 == page.count("| the same prompt, my salt |") == page.count("| of two salts |")
    assert "**Not as it must be.**" in page


def test_of_the_recorded_times_those_across_salts_tell_nothing() -> None:
    record = record_of("cache_salts")
    assert ["lookup", "after", "beside"] == list(record["measured"])
    assert all(each["as_expected"] for each in record["measured"].values())
