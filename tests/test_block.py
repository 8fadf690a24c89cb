"""Blocks: golden bytes, round trips, and bytes that were never a block."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from torchcache import block
from torchcache.block import HEAD_BYTES, BlockHead, check, column_starts, encode
from torchcache.errors import CorruptStoreError
from torchcache.flatten import flatten, flatten_many
from torchcache.schema import Schema

SAMPLES = [(torch.tensor([i, i + 1], dtype=torch.int16), "ab" * i, i) for i in range(3)]


def schema_of(samples: list[Any], ragged: tuple[int, ...] = ()) -> Schema:
    spec, leaves = flatten(samples[0])
    return Schema(spec, tuple(None if i in ragged else dims for i, (dims, _) in enumerate(leaves)))


def encoded(samples: list[Any] = SAMPLES, ragged: tuple[int, ...] = (1,)) -> tuple[Schema, bytearray]:
    schema = schema_of(samples, ragged)
    return schema, encode(schema, 7, flatten_many(range(len(samples)), samples))


def test_golden_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The format of docs/format.md, byte for byte; a change of it needs another FORMAT_VERSION."""
    monkeypatch.setattr(block.os, "urandom", lambda n: bytes(range(n)))
    schema, data = encoded()
    head = "000102030405060708090a0b0c0d0e0f0700000003000000f6000000000000000a5448ef" + "00" * 12
    tensors = "000001000100020002000300"
    # Three records of (offset from the record, length); the values start at byte 240.
    texts = "800000000000000000000000000000007000000000000000020000000000000062000000000000000400000000000000"
    labels = "000000000000000001000000000000000200000000000000"
    expected = head + tensors.ljust(128, "0") + texts.ljust(128, "0") + labels.ljust(128, "0") + b"ababab".hex()
    assert data.hex() == expected
    assert schema.to_json() == (
        b'{"shapes":[[2],null,[]],"spec":["tuple",[["tensor","int16",1,[],0],["str"],["int"]]]}'
    )


def test_round_trip() -> None:
    schema, data = encoded()
    check(data, schema, checksum=True)
    head = BlockHead.read(data)
    assert (head.schema_id, head.count, head.nbytes) == (7, 3, len(data))
    starts, _ = column_starts(schema.columns, head.count)
    for row, sample in enumerate(SAMPLES):
        values = []
        for column, start in zip(schema.columns, starts, strict=True):
            offset, shape = start + row * column.stride, column.shape
            if shape is None:
                record = np.frombuffer(data, "<i8", 1 + column.ndim, offset)
                offset, shape = offset + int(record[0]), tuple(record[1:].tolist())
            values.append(column.decode(data, offset, shape, True))
        restored = schema.rebuild(values)
        assert torch.equal(restored[0], sample[0])
        assert restored[1:] == sample[1:]


def test_alignment() -> None:
    samples = [(np.zeros(i, np.complex128), b"x" * i, torch.zeros(i, 2)) for i in range(5)]
    schema, data = encoded(samples, ragged=(0, 1, 2))
    check(data, schema, checksum=True)
    starts, _ = column_starts(schema.columns, 5)
    assert all((start - HEAD_BYTES) % 64 == 0 for start in starts)


def test_padded_to_a_page() -> None:
    schema = schema_of(SAMPLES, (1,))
    data = encode(schema, 0, flatten_many([0], SAMPLES[:1]), min_bytes=4096)
    assert len(data) == 4096
    check(data, schema, checksum=True)


def test_ids_are_random() -> None:
    assert BlockHead.read(encoded()[1]).block_id != BlockHead.read(encoded()[1]).block_id


@pytest.mark.parametrize("length", [0, 1, HEAD_BYTES - 1, HEAD_BYTES, 100, 245])
def test_shorter_than_it_says(length: int) -> None:
    schema, data = encoded()
    with pytest.raises(CorruptStoreError):
        check(data[:length], schema, checksum=False)


def test_every_flipped_bit_is_found() -> None:
    schema, data = encoded()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CorruptStoreError):
            check(damaged, schema, checksum=True)


def test_hostile_blocks_are_never_read_outside() -> None:
    """Whatever the records say: with the right checksum the structure alone must be refused or harmless."""
    schema, data = encoded()
    rng = random.Random(0)
    start = column_starts(schema.columns, 3)[0][1]
    for _ in range(300):
        damaged = bytearray(data)
        number = rng.choice([-1, 1 << 62, -(1 << 62), 1 << 31, rng.randrange(-300, 300), (1 << 63) - 1])
        position = start + 8 * rng.randrange(6)
        damaged[position : position + 8] = number.to_bytes(8, "little", signed=True)
        try:
            check(damaged, schema, checksum=False)
        except CorruptStoreError:
            continue
        records = np.frombuffer(damaged, "<i8", 6, start).reshape(3, 2)
        ends = records.sum(axis=1) + start + 16 * np.arange(3)
        assert (records[:, 1] >= 0).all()
        assert (ends <= len(damaged)).all()
