"""What tests and the processes they start have in common."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
from collections import Counter, UserDict, UserList, deque
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from torchcache import CachedDataset, owner

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")


def mounted(folder: Path, options: str) -> None:
    """Mounts an empty file system, which the caller unmounts."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr!r}")


def image_and_label(index: int) -> tuple[torch.Tensor, int]:
    """A sample that differs for every index and is the same in every process."""
    return torch.arange(index, index + 48, dtype=torch.float32, device="cpu").reshape(3, 4, 4), index % 10


class Source(Dataset[Any]):
    """A map-style dataset that counts its reads in a file, so that all processes are counted.

    Args:
        length: number of samples.
        log: the file to which every read appends its index.
        make: the sample of an index.
    """

    def __init__(self, length: int, log: Path, make: Any = image_and_label) -> None:
        self.length = length
        self.log = log
        self.make = make
        log.touch()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if not -self.length <= index < self.length:
            raise IndexError(index)
        index = int(index) % self.length
        with open(self.log, "ab", buffering=0) as log:  # one appended write each: atomic
            log.write(struct.pack("<q", index))
        return self.make(index)

    def reads(self) -> Counter[int]:
        """How often each sample was read, by anybody."""
        return Counter(np.fromfile(self.log, "<i8").tolist())

    def __fingerprint__(self) -> Any:
        return (self.length, str(self.log), self.make)


def other_owner(cached: CachedDataset, indices: list[int]) -> owner.Owner:
    """Another owner of the store that is open, with claims."""
    cache = cached._connection._cache
    assert cache is not None
    other = owner.Owner(cached.path / "owners")
    cache.store.join(other)
    assert cache.store.claim(other, 0, lambda entries: indices).granted == indices
    return other


def assert_same(a: Any, b: Any) -> None:
    """Same type, dtype, shape, strides, flags, bits, order of keys, attributes, all the way down."""
    assert type(a) is type(b), f"{type(a)} is not {type(b)}"
    if isinstance(a, torch.Tensor):
        _assert_same_tensor(a, b)
    elif isinstance(a, np.ma.MaskedArray):
        assert_same(a.data, b.data)
        assert_same(np.ma.getmaskarray(a), np.ma.getmaskarray(b))
        assert_same(a.fill_value, b.fill_value)
        assert (a.hardmask, np.ma.getmask(a) is np.ma.nomask) == (b.hardmask, np.ma.getmask(b) is np.ma.nomask)
    elif isinstance(a, (np.ndarray, np.generic)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert [type(key) for key in a] == [type(key) for key in b]
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (tuple, list, deque)):
        assert len(a) == len(b)
        assert getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, (set, frozenset)):
        assert {(type(x), x) for x in a} == {(type(x), x) for x in b}
    elif isinstance(a, (float, complex)):
        assert struct.pack("<dd", a.real, a.imag) == struct.pack("<dd", b.real, b.imag)
    elif hasattr(a, "getpalette"):
        assert (a.mode, a.size, a.tobytes(), a.getpalette()) == (b.mode, b.size, b.tobytes(), b.getpalette())
        assert a.info == b.info
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, (UserDict, UserList)):
        assert_same(vars(a), vars(b))
    elif isinstance(a, Decimal):
        assert a.as_tuple() == b.as_tuple()  # a signalling NaN must not be compared
    else:
        assert repr(a) == repr(b)  # where a NaN is not equal to itself
        assert a == b or a != a


def _assert_same_tensor(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a.dtype, a.shape, a.layout, a.requires_grad) == (b.dtype, b.shape, b.layout, b.requires_grad)
    assert_same(a.__dict__, b.__dict__)
    if a.layout is not torch.strided:
        assert a.layout is not torch.sparse_coo or a.is_coalesced() == b.is_coalesced()
        for x, y in zip(_stored(a), _stored(b), strict=True):
            assert (x.dtype, x.shape, bits(x)) == (y.dtype, y.shape, bits(y))
        return
    # The stride of a dimension of one element has no meaning.
    strides = [[step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1] for x in (a, b)]
    assert a.numel() == 0 or strides[0] == strides[1]
    assert bits(a) == bits(b)


def _stored(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of which a sparse one consists."""
    if x.layout is torch.sparse_coo:
        return [x._indices(), x._values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    return [x.ccol_indices(), x.row_indices(), x.values()]


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous().reshape(-1)
    return b"" if flat.numel() == 0 else flat.view(torch.uint8).numpy().tobytes()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
