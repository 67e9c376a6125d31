"""The kit finds what is wrong with a format, and with a backend that declares that it reads one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import pytest
import torch
from kvframe_testing.case import round_trip
from kvframe_testing.conformance import check_backend
from kvframe_testing.formats import check_format
from kvframe_testing.grid import installed_formats, make_cases
from kvframe_testing.laws import ConformanceError

from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.contract.backend import KVCache
from kvframe.contract.formats import PLAIN, KVFormat, PlainFormat, StateTensor
from kvframe.contract.slots import Slots


@attrs.frozen(kw_only=True)
class Halves(PlainFormat):
    """Keys and values of half their size."""

    name: ClassVar[str] = "halves"

    def write(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write(key / 2, value / 2, kv_cache, slots)

    def read(self, kv_cache: Any, block_ids: Any, out: Any) -> None:
        super().read(kv_cache, block_ids, out)
        for tensor in out.values():
            tensor.mul_(2)


class Coarse(Halves):
    """Rounds, but declares no rounding."""

    def write(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write((key * 16).round() / 16, value, kv_cache, slots)


class NextSlot(Halves):
    def write(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write(key, value, kv_cache, slots)
        blocks, offsets = slots.indices
        beside = offsets + 1 - 3 * (offsets == 2).long()
        super().write(key, value, kv_cache, Slots.at(blocks, beside, slots.block_size))
        super().write(key, value, kv_cache, slots)


class NextPage(Halves):
    def write(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write(key, value, kv_cache, slots)
        kv_cache["k"][-1] = 0


class Forgetful(Halves):
    def read(self, kv_cache: Any, block_ids: Any, out: Any) -> None:
        super().read(kv_cache, block_ids.sort().values, out)


class Beside(Halves):
    def read(self, kv_cache: Any, block_ids: Any, out: Any) -> None:
        super().read(kv_cache, block_ids, out)
        keys = out["k"]
        keys.as_strided(keys.shape, keys.stride(), keys.storage_offset() + keys[0].numel() if len(keys) else 0)[-1:] = 0


class HidesNaN(Halves):
    def write(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write(key.nan_to_num(), value, kv_cache, slots)


class SpreadsNaN(Halves):
    def write(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write(key + key.sum() * 0, value, kv_cache, slots)


class BesideItsPart(Halves):
    def write(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write(key, value, kv_cache, slots)
        keys = kv_cache["k"]
        before = keys.as_strided(keys.shape[:1], keys.stride()[:1], keys.storage_offset() - 1)
        before.index_fill_(0, slots.blocks, 1)


class OutOfBounds(Halves):
    def write(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write(key, value, kv_cache, Slots.at(slots.blocks, slots.offsets + 100, slots.block_size))


class WritesKeys(Halves):
    def write(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write(key, value, kv_cache, slots)
        key.zero_()


class WritesSlots(Halves):
    def write(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write(key, value, kv_cache, slots)
        slots.offsets.zero_()


class Raises(Halves):
    def read(self, kv_cache: Any, block_ids: Any, out: Any) -> None:
        raise KeyError("codes")


class WritesTheCache(Halves):
    def read(self, kv_cache: Any, block_ids: Any, out: Any) -> None:
        super().read(kv_cache, block_ids, out)
        kv_cache["k"].zero_()


class KeysForValues(Halves):
    def read(self, kv_cache: Any, block_ids: Any, out: Any) -> None:
        super().read(kv_cache, block_ids, out)
        out["v"].copy_(out["k"][..., : out["v"].shape[-1]])


class OtherShape(Halves):
    def read(self, kv_cache: Any, block_ids: Any, out: Any) -> None:
        out["k"].copy_(kv_cache["k"].index_select(0, block_ids)[..., :-1])


class Resizes(Halves):
    def read(self, kv_cache: Any, block_ids: Any, out: Any) -> None:
        super().read(kv_cache, block_ids, out)
        out["v"].resize_(0)


class OtherTensors(Halves):
    """Does not write to its arguments."""

    def read(self, kv_cache: Any, block_ids: Any, out: Any) -> None:
        out.update({name: kv_cache[name].index_select(0, block_ids) * 2 for name in out})


class OtherDtype(Halves):
    """Stores whole numbers, but declares no rounding."""

    def state_tensors(self, *sizes: Any) -> Mapping[str, StateTensor]:
        return super().state_tensors(*sizes[:-1], "int8")


class TooShort(Halves):
    def state_tensors(self, *sizes: Any) -> Mapping[str, StateTensor]:
        return super().state_tensors(sizes[0], sizes[1], sizes[2] - 1, *sizes[3:])


class NoTensors(Halves):
    def state_tensors(self, *sizes: Any) -> Any:
        return None


class NoSize(Halves):
    def state_tensors(self, *sizes: Any) -> Mapping[str, StateTensor]:
        return {**super().state_tensors(*sizes), "scale": StateTensor((0, 4), "float32")}


class Divides(Halves):
    def state_tensors(self, *sizes: Any) -> Mapping[str, StateTensor]:
        raise ZeroDivisionError("by zero heads")


class Waits(Halves):
    def write(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write(
            key, value, kv_cache, Slots(torch.tensor(slots.flat.tolist(), dtype=torch.int64), slots.block_size)
        )


@pytest.mark.parametrize("kv_format", [PLAIN, Halves(), *installed_formats()], ids=lambda kv_format: kv_format.name)
def test_formats_that_keep_the_laws_pass(kv_format: KVFormat) -> None:
    check_format(kv_format)


@pytest.mark.parametrize(
    ("kv_format", "message"),
    [
        (Coarse, "k of torch.float32 is read back with an error of .* of the largest element, and rounding is 0"),
        (NextSlot, r"write\(\) changes other slots"),
        (NextPage, r"write\(\) changes bytes of other pages"),
        (Forgetful, "a page is read differently beside other pages"),
        (Beside, r"read\(\) writes beside the pages of out"),
        (HidesNaN, "NaN in k is read back as 0.0"),
        (SpreadsNaN, "NaN in k spreads to other tokens or heads"),
        (Waits, r"write\(\) waits for a value of the device: NotImplementedError: Cannot copy out of meta tensor"),
        (BesideItsPart, r"write\(\) changes bytes of other layers"),
        (OutOfBounds, r"write\(\) raises IndexError: index 100 is out of bounds"),
        (WritesKeys, r"write\(\) writes to its arguments"),
        (WritesSlots, r"write\(\) writes to its arguments"),
        (Raises, r"read\(\) raises KeyError: 'codes'"),
        (WritesTheCache, r"read\(\) writes to the cache or to the block ids"),
        (KeysForValues, "v of torch.float32 is read back with an error of .* of the largest element"),
        (OtherShape, r"read\(\) raises RuntimeError: The size of tensor a \(16\) must match"),
        (Resizes, r"read\(\) changes the shape of out"),
        (OtherTensors, r"k of torch.float32 is read back with an error of .* of the largest element"),
        (OtherDtype, r"k of torch.float32 is read back with an error of .* of the largest element"),
        (TooShort, r"write\(\) raises RuntimeError: shape mismatch"),
        (NoTensors, r"state_tensors\(\) has to give StateTensors by name, at least one, not None"),
        (NoSize, r"'scale' has the shape \(0, 4\); a shape is a tuple of whole numbers from 1 on"),
        (Divides, r"state_tensors\(\) raises ZeroDivisionError: by zero heads"),
    ],
)
def test_the_kit_says_what_is_wrong(kv_format: type[KVFormat], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_format(kv_format())


# --- backends ---------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Swapped(Halves):
    """Stores values first."""

    name: ClassVar[str] = "swapped"

    def state_tensors(self, *sizes: Any) -> Mapping[str, StateTensor]:
        return dict(reversed(super().state_tensors(*sizes).items()))


class ReadsHalves(TorchReferenceBackend):
    """Reads pages of half-size values itself."""

    capabilities = attrs.evolve(
        TorchReferenceBackend.capabilities,
        formats=frozenset({"plain", "halves"}),
        takes_copies=False,
        returns_lse=False,
    )

    def attend(self, layer: Any, query: Any, kv_cache: KVCache, metadata: Any, **options: Any) -> torch.Tensor:
        if layer.spec.kv_format != PLAIN:
            kv_cache = {name: tensor * self.factor for name, tensor in kv_cache.items()}
        return super().attend(layer, query, kv_cache, metadata, **options)

    factor = 2.0


class ReadsWrong(ReadsHalves):
    factor = 2.01


class WritesBeside(ReadsHalves):
    def write_kv(self, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        super().write_kv(key, value, kv_cache, slots)
        kv_cache["v"][7, 0, 0, 0] = 1


def cases_of(backend: type[TorchReferenceBackend], *formats: KVFormat) -> list[Any]:
    return [case for case in make_cases(backend.capabilities, formats=formats) if case.spec.kv_format != PLAIN]


def test_a_backend_is_checked_on_every_format_that_it_reads() -> None:
    cases = cases_of(ReadsHalves, Halves(), Swapped())
    assert {Halves()} == {case.spec.kv_format for case in cases}
    assert len(cases) > 50
    for case in cases[::5]:
        check_backend(ReadsHalves, case)
        check_backend(ReadsHalves, case, poison=1e4)


def test_a_backend_that_takes_copies_is_checked_on_all() -> None:
    cases = cases_of(TorchReferenceBackend, Halves(), Swapped())
    assert {Halves(), Swapped()} == {case.spec.kv_format for case in cases}
    for case in cases[::11]:
        check_backend(TorchReferenceBackend, case)


def test_installed_formats_are_checked_unless_others_are_given() -> None:
    names = {case.spec.kv_format.name for case in make_cases(TorchReferenceBackend.capabilities)}
    assert {"plain", *(kv_format.name for kv_format in installed_formats())} == names
    assert {"int8_token_head"} < names


def test_a_format_that_nobody_has_cannot_be_declared() -> None:
    with pytest.raises(ConformanceError, match="declare the formats halves, which no installed plugin provides"):
        make_cases(ReadsHalves.capabilities)


@pytest.mark.parametrize(
    ("backend", "message"), [(ReadsWrong, "queries are wrong"), (WritesBeside, "write_kv changes .* beside its slots")]
)
def test_a_backend_that_reads_or_writes_a_format_wrongly_is_found(backend: Any, message: str) -> None:
    (case,) = [case for case in cases_of(backend, Halves()) if case.name == "halves-full-block=16-mixed"]
    with pytest.raises(ConformanceError, match=message):
        check_backend(backend, case)


def test_a_round_trip_is_what_a_format_makes_of_numbers() -> None:
    key, value = torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[0.0, 127.0]]])
    (int8,) = [kv_format for kv_format in installed_formats() if kv_format.name == "int8_token_head"]
    stored_key, stored_value = round_trip(int8, key, value)
    torch.testing.assert_close(stored_key, torch.tensor([[[42 * 3 / 127, 3.0]]]))
    assert torch.equal(value, stored_value)
