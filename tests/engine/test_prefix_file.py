"""Damaged, foreign and forged files of saved prefixes: each is refused in one sentence, and nothing changes."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from kvframe_engine.contract.errors import PrefixFileError
from kvframe_engine.prefixes.file_format import Contents
from kvframe_engine.prefixes.file_reader import PrefixFileReader
from kvframe_testing.audit import audit, findable_pages
from kvframe_transformers.testing import save_tiny

from kvframe import Engine, Stack
from tests.models.serving import TinyModel, ids, make_stack
from tests.support.engines import held_pages, manager_of, storage_of

SYSTEM = ids(3, 37)


def refusal(engine: Engine, path: Path) -> PrefixFileError:
    """Return why a file is refused, after a check that nothing changed and that the reason is one sentence."""
    before = (set(findable_pages(manager_of(engine))), storage_of(engine).pool.clone(), manager_of(engine).stats)
    with pytest.raises(PrefixFileError) as refused:
        engine.load_prefixes(path)
    after = (set(findable_pages(manager_of(engine))), storage_of(engine).pool, manager_of(engine).stats)
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]
    assert str(refused.value).startswith(str(path) if path.exists() else "there is no file")
    assert "\n" not in str(refused.value)
    return refused.value


@attrs.frozen
class Serving:
    """An engine with something in its cache, and a file that it saved."""

    engine: Engine
    file: bytes


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("file")
    path = folder / "prefixes"
    with TinyModel.save(folder / "model", "llama").engine(block_size=4, memory="256KiB") as engine:
        engine.save_prefixes(path, [SYSTEM[:8], ids(9, 4)], cache_salt="tenant")
        yield Serving(engine, path.read_bytes())


def test_a_file_with_a_bit_flipped_is_refused(serving: Serving, tmp_path: Path) -> None:
    path, file = tmp_path / "prefixes", serving.file
    length = 8 + int.from_bytes(file[:8], "little")
    # A bit of each byte of its list of prefixes and of its numbers, of every third of the header, of some of its pages.
    end_of_pages = len(file) - 400
    for index in [*range(0, length, 3), *range(length, end_of_pages, 211), *range(end_of_pages, len(file))]:
        damaged = bytearray(file)
        damaged[index] ^= 1 << (index % 8)
        path.write_bytes(damaged)
        assert refusal(serving.engine, path).code in ("damaged", "version", "other_model", "other_cache"), index
    path.write_bytes(file)
    assert [8, 4] == [each.num_tokens for each in serving.engine.load_prefixes(path)]


def test_a_truncated_or_longer_file_is_refused(serving: Serving, tmp_path: Path) -> None:
    path, file = tmp_path / "prefixes", serving.file
    for length in [*range(64), *range(64, len(file), 97), len(file) - 1]:
        path.write_bytes(file[:length])
        assert "damaged" == refusal(serving.engine, path).code
    path.write_bytes(file + b"\0")
    assert "damaged" == refusal(serving.engine, path).code


def test_what_is_no_file_of_prefixes_is_refused(serving: Serving, llama: TinyModel, tmp_path: Path) -> None:
    engine, path = serving.engine, tmp_path / "prefixes"
    assert "unreadable" == refusal(engine, path).code
    path.mkdir()
    with pytest.raises(PrefixFileError, match="there is no file"):
        engine.load_prefixes(path)
    assert "another kind of file" in str(refusal(engine, llama.path / "model.safetensors"))
    path.rmdir()
    path.write_bytes(b"a text of some length that is no such file at all")
    assert "damaged" == refusal(engine, path).code


def test_a_file_of_another_model_or_cache_is_refused(llama: TinyModel, serving: Serving, tmp_path: Path) -> None:
    path = tmp_path / "prefixes"
    path.write_bytes(serving.file)
    for seed, config, code, text in (
        (1, {}, "other_model", "other weights"),
        (0, {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, "other_model", "its config differs"),
    ):
        save_tiny(tmp_path / text, "llama", seed=seed, **config)
        with Engine.from_pretrained(tmp_path / text, stack=make_stack(block_size=4)) as engine:
            error = refusal(engine, path)
            assert (code, True) == (error.code, text in str(error))
    for options, text in (
        ({"block_size": 8}, "group 0 has block_size 4 there and 8 here"),
        ({"format": "int8_token_head"}, "group 0 has dtypes ['float32'] there and ['float32', 'int8'] here"),
        ({"dtype": "bfloat16"}, "group 0 has dtypes ['float32'] there and ['bfloat16'] here"),
    ):
        with llama.engine(**{"block_size": 4, **options}) as engine:
            error = refusal(engine, path)
            assert ("other_cache", True) == (error.code, text in str(error)), error
    stack = Stack.from_mapping({"cache": {"block_size": 4, "memory": "1MiB"}, "model": {"dtype": "bfloat16"}})
    with Engine.from_pretrained(llama.path, stack=stack) as engine:
        assert "other_model" == refusal(engine, path).code


def test_one_changed_number_makes_another_model(llama: TinyModel, serving: Serving, tmp_path: Path) -> None:
    path = tmp_path / "prefixes"
    path.write_bytes(serving.file)
    loaded: Any = llama.loaded
    with llama.engine(block_size=4) as engine:
        engine.load_prefixes(path)
        weight = loaded.model.model.layers[1].mlp.up_proj.weight
        before = weight[3, 5].item()
        with torch.no_grad():
            weight[3, 5] += 1e-3
        try:
            # The caller resets the cache after a change of weights, which drops the fingerprint.
            engine.reset_prefix_cache()
            assert "other weights" in str(refusal(engine, path))
        finally:
            with torch.no_grad():
                weight[3, 5] = before


# --- forged files with right checksums --------------------------------------------------------------------------------

Parts = dict[str, Any]
"""The parts of a file: the values of its tensors, and the fields of its header."""


def parts_of(file: bytes) -> Parts:
    length = int.from_bytes(file[:8], "little")
    contents = json.loads(json.loads(file[8 : 8 + length])["__metadata__"]["contents"])
    parts: Parts = {"origin": contents["origin"]}
    start = 8 + length
    for name in ("pages", "offsets", "tokens", "prefixes"):
        parts[name] = file[start : start + contents["sizes"][name]]
        start += contents["sizes"][name]
    parts["offsets"] = np.frombuffer(parts["offsets"], dtype=np.uint64).copy()
    parts["tokens"] = np.frombuffer(parts["tokens"], dtype=np.uint32).copy()
    parts["prefixes"] = json.loads(parts["prefixes"])
    return parts


def forged(parts: Parts) -> bytes:
    """Return a file with these parts, as kvframe would write it."""
    listed = parts["prefixes"]
    data = {
        "pages": bytes(parts["pages"]),
        "offsets": parts["offsets"].tobytes(),
        "tokens": parts["tokens"].tobytes(),
        "prefixes": listed if isinstance(listed, bytes) else json.dumps(listed).encode(),
    }
    sizes = {name: len(each) for name, each in data.items()} | parts.get("sizes", {})
    checksums = {name: hashlib.blake2b(each, digest_size=32).hexdigest() for name, each in data.items()}
    header = Contents(parts["origin"], sizes, checksums).header()
    for was, now in parts.get("header", ()):
        assert was in header
        header = header.replace(was, now, 1)
    return len(header).to_bytes(8, "little") + header + b"".join(data.values())


def first(**changes: Any) -> Callable[[Parts], None]:
    return lambda parts: parts["prefixes"][0].update(changes)


def put(name: str, index: int, value: int) -> Callable[[Parts], None]:
    return lambda parts: parts[name].__setitem__(index, value)


def replace(**changes: Any) -> Callable[[Parts], None]:
    return lambda parts: parts.update(changes)


MADE_UP: dict[str, tuple[Callable[[Parts], None], str]] = {
    "a token id out of range": (put("tokens", 3, 128), "token ids outside of [0, 128)"),
    "the largest token id": (put("tokens", 11, 2**32 - 1), "token ids outside of [0, 128)"),
    "an offset after the end": (put("offsets", 0, 3 * 3072 - 3071), "a page lies after the end"),
    "the largest offset": (put("offsets", 2, 2**64 - 1), "a page lies after the end"),
    "no pages": (replace(pages=b""), "a page lies after the end"),
    "half a block": (first(num_tokens=6), "number of tokens"),
    "half a block, and tokens for it": (
        lambda parts: parts.update(tokens=parts["tokens"][:-2]) or first(num_tokens=6)(parts),
        "a prefix has 6 tokens, which are not whole blocks",
    ),
    "nothing at all": (
        replace(
            prefixes=[{"num_tokens": 0, "salt": "", "inputs": {}, "num_pages": [0]}],
            tokens=np.zeros(0, dtype=np.uint32),
            offsets=np.zeros(0, dtype=np.uint64),
        ),
        "a prefix has 0 tokens",
    ),
    "a billion tokens": (first(num_tokens=10**9), "number of tokens"),
    "a billion pages": (first(num_pages=[10**9]), "number of pages"),
    "pages of two groups": (first(num_pages=[1, 1]), "a group that the model does not have"),
    "fewer pages than needed": (
        lambda parts: parts.update(offsets=parts["offsets"][1:]) or first(num_pages=[1])(parts),
        "other pages than it needs",
    ),
    "tokens below nothing": (first(num_tokens=-4), "its list of prefixes is not"),
    "tokens as a truth": (first(num_tokens=True), "its list of prefixes is not"),
    "half a token": (first(num_tokens=8.0), "its list of prefixes is not"),
    "a salt that is no text": (first(salt=["tenant"]), "its list of prefixes is not"),
    "a salt that is no Unicode": (first(salt="\ud800"), "its list of prefixes is not"),
    "an input that is not known": (
        first(inputs={"encoder": {"num_tokens": 4, "key": "00"}}),
        "an input or a group that the model does not have",
    ),
    "an input of nothing": (first(inputs={"encoder": {"num_tokens": 0, "key": "00"}}), "its list of prefixes is not"),
    "an input whose key is none": (first(inputs={"encoder": {"num_tokens": 1, "key": "0"}}), "its list of prefixes"),
    "inputs as a list": (first(inputs=[]), "its list of prefixes is not"),
    "one thing more": (first(more=1), "its list of prefixes is not"),
    "a list that is none": (replace(prefixes={"num_tokens": 4}), "its list of prefixes is not"),
    "prefixes that are numbers": (replace(prefixes=[1, 2]), "its list of prefixes is not"),
    "a billion prefixes": (replace(prefixes=b"[" + b"0," * 3_000_000 + b"0]"), "more than 4194304"),
    "a deep list": (replace(prefixes=b"[" * 1_000_000), "its list of prefixes is not JSON"),
    "a list that is not JSON": (replace(prefixes=b"\xff"), "its list of prefixes is not JSON"),
    "a number of a million digits": (replace(prefixes=b"[" + b"9" * 1_000_000 + b"]"), "is not JSON"),
    "huge sizes": (replace(sizes={"pages": 2**62}), "its header gives"),
    "sizes that overflow": (replace(sizes={"pages": 2**63, "offsets": 2**63}), "its header is not"),
    "sizes below nothing": (replace(sizes={"pages": -8}), "its header is not"),
    "a size that is no number of tokens": (replace(sizes={"tokens": 47}), "its header is not"),
    "another dtype": (replace(header=[(b'"dtype":"U32"', b'"dtype":"F32"')]), "its header is not"),
    "tensors that overlap": (replace(header=[(b'"data_offsets":[0,', b'"data_offsets":[8,')]), "its header is not"),
    "another shape": (replace(header=[(b'"shape":[12]', b'"shape":[1,12]')]), "its header is not"),
    "a name twice": (replace(header=[(b'{"__metadata__"', b'{"pages":0,"__metadata__"')]), "its header is not"),
    "something more": (replace(header=[(b'{"__metadata__"', b'{"zzz":0,"__metadata__"')]), "its header is not"),
    "an older version": (
        replace(header=[(b'"version":"4"', b'"version":"1"')]),
        "of version '1' of the format, and this kvframe reads version 4; save the prefixes again",
    ),
    "a newer version": (replace(header=[(b'"version":"4"', b'"version":"5"')]), "of version '5' of the format"),
    "an origin that is none": (replace(origin={"config": []}), "its config differs"),
    "groups that are none": (lambda parts: parts["origin"].update(groups=[7]), "group 0 has kind 7 there"),
    "a layout that is none": (lambda parts: parts["origin"].update(layout=7), "its layers lie in other places"),
}


@pytest.mark.parametrize("what", MADE_UP)
def test_a_file_that_was_made_up_is_refused(what: str, serving: Serving, tmp_path: Path) -> None:
    change, why = MADE_UP[what]
    parts = parts_of(serving.file)
    change(parts)
    (tmp_path / "prefixes").write_bytes(forged(parts))
    assert why in str(refusal(serving.engine, tmp_path / "prefixes"))


@pytest.mark.parametrize(
    "header",
    [
        b'{"__metadata__":' + b"[" * 500_000,
        b"[" * 500_000,
        b"[]",
        b'"text"',
        b'{"__metadata__":[]}',
        b'{"__metadata__":{"format":"kvframe.prefixes","version":"4"}}',
        b'{"__metadata__":{"format":"kvframe.prefixes","version":"4","contents":"[]"}}',
        b'{"__metadata__":{"format":"kvframe.prefixes","version":"4","contents":"{}","checksum":1}}',
        b'{"__metadata__":{"format":"kvframe.prefixes","version":"4","contents":"\\ud800"}}',
    ],
    ids=lambda header: str(header[:70]),
)
def test_a_header_that_was_made_up_is_refused(header: bytes, serving: Serving, tmp_path: Path) -> None:
    path = tmp_path / "prefixes"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "damaged" == refusal(serving.engine, path).code


def test_parts_that_nobody_changed_are_loaded(serving: Serving, tmp_path: Path) -> None:
    path = tmp_path / "prefixes"
    path.write_bytes(forged(parts_of(serving.file)))
    assert all(each.is_cached for each in serving.engine.load_prefixes(path))


class Counted(list[Any]):
    """A list that counts how many of its entries are read."""

    num_visits = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_visits += len(found) if isinstance(key, slice) else 1
        return found


def test_a_prefix_of_a_file_with_many_is_read_without_a_look_at_the_others(serving: Serving, tmp_path: Path) -> None:
    path, parts, num_prefixes = tmp_path / "prefixes", parts_of(serving.file), 500
    entry = {"num_tokens": 1, "salt": "", "inputs": {}, "num_pages": [1]}
    parts["prefixes"] = [entry] * num_prefixes
    parts["tokens"] = np.arange(num_prefixes, dtype=np.uint32)
    parts["offsets"] = np.arange(num_prefixes, dtype=np.uint64)
    path.write_bytes(forged(parts))
    with PrefixFileReader(path) as reader:
        reader.prefixes = listed = Counted(reader.prefixes)
        for index in (0, 250, num_prefixes - 1):
            assert ([index], [index]) == (reader.tokens(index).tolist(), reader.offsets(index)[0].tolist())
        assert listed.num_visits <= 6
    assert "a prefix has 1 tokens, which are not whole blocks" in str(refusal(serving.engine, path))


def test_a_file_that_says_that_it_is_huge_is_read_in_little_memory(serving: Serving, tmp_path: Path) -> None:
    path = tmp_path / "prefixes"
    parts = parts_of(serving.file)
    # Instead of pages, the file has a hole, with the right checksum.
    parts["pages"] = bytes(64 << 20)
    file = forged(parts)
    tracemalloc.start()
    try:
        with path.open("wb") as target:
            length = 8 + int.from_bytes(file[:8], "little")
            target.write(file[:length])
            target.seek(length + (64 << 20))
            target.write(file[length + (64 << 20) :])
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with PrefixFileReader(path) as reader:
            reader.check()
        assert tracemalloc.get_traced_memory()[1] - before < 8 << 20
        for length in (1 << 40, 2**64 - 1, (1 << 20) + 1):
            path.write_bytes(length.to_bytes(8, "little"))
            os.truncate(path, 1 << 40)
            assert "its header is too long" in str(refusal(serving.engine, path))
    finally:
        tracemalloc.stop()


def test_a_file_that_becomes_shorter_while_it_is_loaded_leaves_nothing_behind(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, path = serving.engine, tmp_path / "prefixes"
    path.write_bytes(serving.file)
    engine.reset_prefix_cache()
    # After the check, another program truncates it.
    monkeypatch.setattr(PrefixFileReader, "check", lambda self: os.truncate(path, len(serving.file) - 400 - 3072))
    monkeypatch.setattr(PrefixFileReader, "tokens", lambda self, index: np.full(8 - 4 * index, 5, dtype=np.uint32))
    monkeypatch.setattr(
        PrefixFileReader, "offsets", lambda self, index: [np.arange(2 - index, dtype=np.uint64) * 3072 + 6144 * index]
    )
    with pytest.raises(PrefixFileError, match="it became shorter while it was read"):
        engine.load_prefixes(path)
    audit(manager_of(engine))
    assert 0 == held_pages(engine)
