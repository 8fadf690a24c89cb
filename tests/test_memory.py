"""Memory of large batches is used again, and never while anybody has a batch."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same
from torch.utils.data import DataLoader, Dataset

import torchcache
from torchcache import CachedDataset, memory
from torchcache.memory import LARGE_BYTES, MOST_FREE


@pytest.fixture(autouse=True)
def nothing_free() -> Any:
    gc.collect()
    memory._free.clear()
    yield
    memory._free.clear()


def test_small_tensors_are_pytorchs_own() -> None:
    x = memory.empty((LARGE_BYTES - 1,), torch.uint8)
    assert x.untyped_storage().resizable()
    del x
    assert not memory._free


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex128])
def test_it_is_used_again(dtype: torch.dtype) -> None:
    x = memory.empty((3, LARGE_BYTES), dtype)
    assert (x.dtype, x.shape, x.is_contiguous(), x.requires_grad) == (dtype, (3, LARGE_BYTES), True, False)
    address = x.data_ptr()
    del x
    assert memory.empty((2, LARGE_BYTES + 7), dtype).data_ptr() == address


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:2, 5:],
        lambda x: x.view(torch.int32).T,
        lambda x: x.numpy()[1],
        lambda x: memoryview(x.numpy()),
        lambda x: x.untyped_storage(),
        lambda x: torch.from_dlpack(x),
        lambda x: x.detach().requires_grad_(False),
        lambda x: torch.utils.data.default_convert({"a": [x]}),
    ],
)
def test_not_while_a_view_of_it_exists(view: Any) -> None:
    x = memory.empty((2, LARGE_BYTES), torch.uint8)
    address, kept = x.data_ptr(), view(x)
    del x
    gc.collect()
    assert memory.empty((2, LARGE_BYTES), torch.uint8).data_ptr() != address
    del kept
    gc.collect()
    assert len(memory._free) == 2


def test_what_a_graph_has_saved() -> None:
    weight = torch.ones(1, requires_grad=True)
    x = memory.empty((LARGE_BYTES,), torch.float32).fill_(3)
    loss = (x * weight).sum()
    del x
    memory.empty((LARGE_BYTES,), torch.float32).fill_(7)
    loss.backward()
    assert weight.grad is not None and weight.grad.item() == 3 * LARGE_BYTES


def test_no_more_is_kept_than_is_used() -> None:
    pieces = [memory.empty((LARGE_BYTES + i,), torch.uint8) for i in range(2 * MOST_FREE)]
    del pieces
    assert len(memory._free) == MOST_FREE
    small = memory.empty((LARGE_BYTES,), torch.uint8)
    large = memory.empty((64 * LARGE_BYTES,), torch.uint8)
    assert len(memory._free) == MOST_FREE - 1  # a piece that is much too small, or too large, is not taken
    del large, small
    assert memory.empty((LARGE_BYTES,), torch.uint8).data_ptr() != 0
    assert sorted(map(len, memory._free))[-1] == 64 * LARGE_BYTES


def test_very_large_pieces_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_FREE_BYTES", 5 * LARGE_BYTES)
    pieces = [memory.empty((4 * LARGE_BYTES,), torch.uint8) for _ in range(3)]
    gone = weakref.ref(pieces[0].untyped_storage())
    del pieces
    assert len(memory._free) == 1
    assert gone() is None


def test_copied() -> None:
    for array in (np.arange(10), np.arange(LARGE_BYTES).reshape(2, -1), np.zeros((0, 3)), np.ones(LARGE_BYTES, bool)):
        tensor = memory.copied(array)
        assert_same(tensor, torch.from_numpy(array.copy()))
        assert array.size == 0 or not np.shares_memory(tensor.numpy(), array)


def test_several_threads() -> None:
    """Each finds in its tensors what it has written there."""
    wrong: list[Any] = []

    def work(number: int) -> None:
        held: list[torch.Tensor] = []
        for turn in range(60):
            held = [*held[-2:], memory.empty((LARGE_BYTES + 4096 * (turn % 3),), torch.uint8).fill_(number)]
            wrong.extend(x for x in held if not (x[0] == x[-1] == x[LARGE_BYTES // 2] == number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(memory._free) <= MOST_FREE


def test_a_forked_process_begins_without() -> None:
    x = memory.empty((LARGE_BYTES,), torch.uint8).fill_(1)
    y = memory.empty((LARGE_BYTES,), torch.uint8)
    del y
    pid = os.fork()
    if pid == 0:
        fine = not memory._free and bool(x[0] == 1)
        del x
        fine = fine and len(memory._free) == 1
        memory.empty((LARGE_BYTES,), torch.uint8).numpy().fill(2)  # PyTorch would want threads, which are not here
        os._exit(not fine)
    assert os.waitpid(pid, 0)[1] == 0
    assert bool((x == 1).all()) and len(memory._free) == 1


class Images(Dataset[Any]):
    """Of 300 KB, each of one value, in other orders of memory too."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 100, 1000), index, dtype=torch.uint8), index


@pytest.mark.parametrize("cls", [DataLoader, torchcache.DataLoader])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_that_are_kept_stay_what_they_are(cache_dir: Path, cls: Any, num_workers: int) -> None:
    cached = CachedDataset(Images(), key="k")
    for _ in range(3):  # the first fills
        kept = list(cls(cached, batch_size=32, num_workers=num_workers))
        assert [len(labels) for _, labels in kept] == [32, 32, 32, 4]
        for images, labels in kept:
            assert_same(images, labels.to(torch.uint8)[:, None, None, None].expand(-1, 3, 100, 1000).contiguous())
    del kept, images, labels
    gc.collect()
    memory._free.clear()
    for images, _labels in cls(cached, batch_size=32, num_workers=num_workers, drop_last=True):
        images.add_(1)  # a batch is the user's own
    del images
    gc.collect()
    assert 1 <= len(memory._free) <= MOST_FREE
    assert_same(cached[7], Images()[7])


class Volumes(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        volume = torch.arange(3 * 64 * 64 * 200, dtype=torch.int64).view(3, 64, 64, 200) + index
        return volume, volume.to(torch.bfloat16), volume[0].permute(2, 0, 1)


def test_large_samples(cache_dir: Path) -> None:
    cached = CachedDataset(Volumes(), key="k")
    cached.fill(progress=False)
    kept = [cached[index] for index in range(3)]
    for _ in range(2):
        for index in range(3):
            assert_same(cached[index], Volumes()[index])
    assert_same(kept, [Volumes()[index] for index in range(3)])
