"""The first batches of an untested vLLM are checked: what is said of a batch that is not as expected. Needs no vLLM."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvframe_vllm.adapter.batch_check import check_batch

from kvframe.contract import BackendError


def batch(**changes: Any) -> Any:
    """Return a batch in blocks of 4: a prompt's last 5 of 7 tokens, and one token after 8, padded to 8 tokens."""
    fields = {
        "num_reqs": 2,
        "num_actual_tokens": 6,
        "query_start_loc_cpu": torch.tensor([0, 5, 6, 6], dtype=torch.int32),
        "seq_lens": torch.tensor([7, 9, 0], dtype=torch.int32),
        "block_table_tensor": torch.tensor([[3, 5, 0], [0, 7, 2], [0, 0, 0]], dtype=torch.int32),
        "slot_mapping": torch.tensor([14, 15, 20, 21, 22, 8, -1, -1]),
    }
    return SimpleNamespace(**{**fields, **changes})


def test_a_batch_as_in_the_tested_versions_passes() -> None:
    check_batch(batch(), 4)


def test_slots_of_padding_are_not_compared() -> None:
    check_batch(batch(slot_mapping=torch.full((8,), -1)), 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slot_mapping": torch.tensor([14, 15, 20, 21, 23, 8])}, "1 slots are not in the blocks of their tokens"),
        ({"block_table_tensor": torch.zeros(2, 3, dtype=torch.int32)}, "6 slots are not in the blocks of their tokens"),
        ({"seq_lens": torch.tensor([8, 9])}, "5 slots are not in the blocks of their tokens"),
        ({"seq_lens": torch.tensor([4, 9])}, "a request has more new tokens than tokens"),
        ({"num_actual_tokens": 7}, "its requests have 6 tokens, and it has 7"),
    ],
)
def test_another_batch_is_refused_in_one_sentence(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.99.1"))
    with pytest.raises(BackendError) as error:
        check_batch(batch(**changes), 4)
    assert str(error.value) == (
        f"vLLM 0.99.1 makes batches that are not as kvframe-vllm expects ({message}): install a tested version, "
        "0.29 to 0.33, or unset KVFRAME_STACK to run without kvframe"
    )
