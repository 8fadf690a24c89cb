"""What a job sees of a source that has changed under its key, cannot be reached, or gives what cannot be cached."""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import os
import pickle
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Source, assert_same, image_and_label
from torch.utils.data import DataLoader, default_collate

import torchcache
from torchcache import CacheBypassWarning, CachedDataset, StaleCacheError, UnsupportedSampleError
from torchcache.compare import difference

LENGTH = 40


def other(index: int) -> Any:
    image, label = image_and_label(index)
    return image + 1, label


def nan(index: int) -> Any:
    return torch.full((3,), float("nan")), -0.0


@pytest.fixture
def filled(cache_dir: Path, tmp_path: Path) -> Source:
    source = Source(LENGTH, tmp_path / "reads")
    with CachedDataset(source, name="a", key="k") as cached:
        cached.fill(progress=False)
    return source


def reopened(source: Source, make: Any = image_and_label, **kwargs: Any) -> CachedDataset:
    source.make = make
    return CachedDataset(source, name="a", key="k", **kwargs)


def test_a_changed_source_is_noticed(filled: Source) -> None:
    cached = reopened(filled, other)
    with pytest.raises(StaleCacheError, match=r"of sample \d+, sample\[0\] is .* other values.*another key="):
        cached[0]
    with pytest.raises(StaleCacheError):  # as long as it is so
        cached[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_changed_source_is_noticed_by_a_loader(filled: Source, num_workers: int) -> None:
    with pytest.raises(StaleCacheError, match="another key="):
        list(DataLoader(reopened(filled, other), batch_size=4, num_workers=num_workers))
    gc.collect()  # the loader, which the error has kept alive, and its workers


def test_a_changed_source_is_noticed_by_our_loader(filled: Source) -> None:
    with pytest.raises(StaleCacheError, match="another key="):
        list(torchcache.DataLoader(reopened(filled, other), batch_size=4))


@pytest.mark.parametrize("kwargs", [{"check": 0}, {"on_random": "allow"}, {"on_random": "warn"}])
def test_what_need_not_be_compared_is_not(filled: Source, kwargs: Any) -> None:
    cached = reopened(filled, other, **kwargs)
    assert_same([cached[i] for i in range(LENGTH)], [image_and_label(i) for i in range(LENGTH)])
    assert filled.reads() == Counter(range(LENGTH))


@pytest.mark.parametrize(("check", "num_workers"), [(1, 0), (3, 0), (1000, 0), (3, 2)])
def test_an_unchanged_source_is_read_so_often(filled: Source, check: int, num_workers: int) -> None:
    cached = reopened(filled, check=check)
    for _ in range(2):
        list(DataLoader(cached, batch_size=4, num_workers=num_workers))
    assert filled.reads().total() == LENGTH + min(check, LENGTH)
    if not num_workers:
        assert cached.stats.source_reads == LENGTH + min(check, LENGTH)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_one_process_of_a_job_compares(filled: Source, method: Any) -> None:
    loader = DataLoader(reopened(filled), batch_size=4, num_workers=3, multiprocessing_context=method)
    list(loader)
    assert filled.reads().total() == LENGTH + 1


def test_other_ranks_of_a_node_compare_nothing(filled: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    list(reopened(filled))
    assert filled.reads() == Counter(range(LENGTH))


def test_what_the_job_itself_has_cached_is_not_compared(cache_dir: Path, tmp_path: Path) -> None:
    source = Source(LENGTH, tmp_path / "reads")
    cached = CachedDataset(source, name="a", key="k")
    for _ in range(2):
        list(cached)
        cached.close()
    assert source.reads() == Counter(range(LENGTH))


def test_a_source_that_is_away_is_a_warning(filled: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(self: Source, index: Any) -> Any:
        raise ConnectionError("the bucket is gone")

    monkeypatch.setattr(Source, "__getitem__", away)
    cached = reopened(filled)
    with pytest.warns(CacheBypassWarning, match=r"the bucket is gone.*is served"):
        assert_same(cached[3], image_and_label(3))
    assert_same([cached[i] for i in range(LENGTH)], [image_and_label(i) for i in range(LENGTH)])


def test_the_very_bits_are_compared(cache_dir: Path, tmp_path: Path) -> None:
    source = Source(4, tmp_path / "reads", nan)
    with CachedDataset(source, name="a", key="k") as cached:
        cached.fill(progress=False)
    list(reopened(source, nan, check=4))
    with pytest.raises(
        StaleCacheError, match=r"sample\[1\] is float -0.0 in the cache, and the source gives float 0.0"
    ):
        list(reopened(source, lambda i: (nan(i)[0], 0.0)))


@pytest.mark.parametrize(
    ("cached", "source", "text"),
    [
        ([1, 2], [1, 3], "sample[1] is int 2 in the cache, and the source gives int 3"),
        ({"a": 1}, {"b": 1}, "sample is a dict of 1 in the cache, and the source gives other values"),
        ((1,), [1], "sample is a tuple of 1 in the cache, and the source gives a list of 1"),
        (
            torch.zeros(2),
            torch.zeros(3),
            "shape [2] in the cache, and the source gives a torch.Tensor of torch.float32",
        ),
        (1, True, "sample is int 1 in the cache, and the source gives bool True"),
        ("x" * 90, "y", f"sample is str '{'x' * 36}... in the cache"),
    ],
)
def test_differences_are_described(cached: Any, source: Any, text: str) -> None:
    assert text in difference(cached, source)
    assert difference(cached, copy.deepcopy(cached)) == ""


def test_bad_arguments(tmp_path: Path) -> None:
    source = Source(LENGTH, tmp_path / "reads")
    with pytest.raises(ValueError, match="check=-1"):
        CachedDataset(source, check=-1)
    with pytest.raises(ValueError, match="on_unsupported is"):
        CachedDataset(source, on_unsupported="ignore")  # type: ignore[arg-type]


def some_unsupported(index: int) -> Any:
    return (torch.ones(2) * index, object if index % 5 == 3 else index)


@pytest.mark.filterwarnings("ignore::torchcache.CacheBypassWarning")  # that of the worker
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_cannot_be_cached_is_read_each_time(cache_dir: Path, tmp_path: Path, num_workers: int) -> None:
    source = Source(20, tmp_path / "reads", some_unsupported)
    cached = CachedDataset(source, key="k", on_unsupported="bypass")
    for epoch in range(3):
        if num_workers:
            found = [s for b in DataLoader(cached, 6, collate_fn=list, num_workers=num_workers) for s in b]
        elif epoch:
            found = [s for b in DataLoader(cached, 6, collate_fn=list) for s in b]
        else:
            with pytest.warns(CacheBypassWarning, match=r"builtins.type cannot be stored.*on_unsupported='bypass'"):
                found = [s for b in DataLoader(cached, 6, collate_fn=list) for s in b]
        assert_same([s[1] for s in found], [some_unsupported(i)[1] for i in range(20)])
    reads = source.reads()
    assert all(reads[i] == (3 if i % 5 == 3 else 1) for i in range(20)), reads
    assert cached.stats.samples_cached == 16
    assert not cached.complete


def test_by_default_it_is_an_error(cache_dir: Path, tmp_path: Path) -> None:
    cached = CachedDataset(Source(20, tmp_path / "reads", some_unsupported), key="k")
    with pytest.raises(UnsupportedSampleError, match=r"sample\[1\]: builtins.type"):
        list(DataLoader(cached, 6, collate_fn=list))
    assert cached.stats.samples_cached == 5


class Collating(Source):
    """Its ``__getitems__`` gives batches that are collated already, as the Hugging Face ones in some formats."""

    def __getitems__(self, indices: list[int]) -> Any:
        images, labels = zip(*[self[i] for i in indices], strict=True)
        return {"images": torch.stack(images), "labels": torch.tensor(labels)}


def unchanged(batch: Any) -> Any:
    return batch


@pytest.mark.filterwarnings("ignore::torchcache.CacheBypassWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("singly_first", [False, True])
def test_a_source_that_collates_is_passed_through(
    cache_dir: Path, tmp_path: Path, num_workers: int, singly_first: bool
) -> None:
    source = Collating(20, tmp_path / "reads")
    kwargs: Any = {"batch_size": 5, "collate_fn": unchanged, "num_workers": num_workers}
    bare = list(DataLoader(source, **kwargs))
    for _ in range(2):  # in a second job too
        cached = CachedDataset(source, key="k")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if singly_first:
                assert_same([cached[i] for i in range(20)], [image_and_label(i) for i in range(20)])
            assert_same(list(DataLoader(cached, **kwargs)), bare)
            assert_same(cached[3], image_and_label(3))
            cached.fill(progress=False)
        assert len(caught) == 1
        assert "gives collated batches" in str(caught[0].message)
        assert not cached.complete
    with pytest.raises(TypeError, match="single samples"), pytest.warns(CacheBypassWarning):
        CachedDataset(source, unchanged, key="k").__getitems__([1, 2])


class TwoFaced(Source):
    """Gives other types by ``__getitems__``, as Hugging Face's ``numpy`` format does."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [np.float32(self[index]) for index in indices]


class Fused(Source):
    """Reads several at once, of a structure that differs."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


@pytest.mark.parametrize("singly_first", [False, True])
def test_a_source_of_two_faces_is_not_cached(cache_dir: Path, tmp_path: Path, singly_first: bool) -> None:
    source = TwoFaced(20, tmp_path / "reads", np.float64)
    cached = CachedDataset(source, key="k")
    with pytest.warns(CacheBypassWarning, match="give samples of other types") as caught:
        if singly_first:
            assert_same(cached[2], source[2])
        for _ in range(2):
            batches = list(DataLoader(cached, 6, collate_fn=unchanged))
            assert_same(batches, list(DataLoader(source, 6, collate_fn=unchanged)))
        assert_same([cached[i] for i in range(20)], [source[i] for i in range(20)])
    assert len(caught) == 1
    assert cached.stats.samples_cached == 0


@pytest.mark.parametrize("make", [image_and_label, lambda i: [i, str(i), None][i % 3]])
def test_a_source_of_one_face_is_read_once(cache_dir: Path, tmp_path: Path, make: Any) -> None:
    source = Fused(20, tmp_path / "reads", make)
    cached = CachedDataset(source, key="k")
    for _ in range(2):
        assert_same(
            list(DataLoader(cached, 6, collate_fn=unchanged)),
            list(DataLoader([make(i) for i in range(20)], 6, collate_fn=unchanged)),
        )
    assert cached.stats.source_reads == 20 + (make is not image_and_label)


def test_random_samples_that_may_be_kept_are(cache_dir: Path, tmp_path: Path) -> None:
    cached = CachedDataset(Fused(4, tmp_path / "reads", lambda i: torch.rand(2)), key="k", on_random="allow")
    assert_same(cached[1], cached[1])
    cached.fill(progress=False)
    assert cached.complete


@pytest.mark.parametrize("values", [[0.5, 1.5, 2.5], [1, 2, 3]])
def test_hugging_face_in_the_numpy_format(cache_dir: Path, values: list[Any]) -> None:
    bare = pytest.importorskip("datasets").Dataset.from_dict({"x": values}).with_format("numpy")
    cached = CachedDataset(bare)
    two_faced = bare[0]["x"].dtype != bare.__getitems__([0])[0]["x"].dtype
    with pytest.warns(CacheBypassWarning, match="'torch'") if two_faced else contextlib.nullcontext():
        for _ in range(2):
            for collate in (unchanged, default_collate):
                assert_same(
                    list(DataLoader(cached, 2, collate_fn=collate)), list(DataLoader(bare, 2, collate_fn=collate))
                )
            assert_same([cached[i] for i in range(3)], [bare[i] for i in range(3)])
    assert cached.complete != two_faced


class Reusing(Source):
    """Gives the same memory for each sample."""

    buffer = torch.zeros(3, 4, 4)

    def __getitem__(self, index: Any) -> Any:
        image, label = super().__getitem__(index)
        return self.buffer.copy_(image), label


def test_a_source_that_reuses_its_memory_is_cached_right(cache_dir: Path, tmp_path: Path) -> None:
    cached = CachedDataset(Reusing(LENGTH, tmp_path / "reads"), key="k")
    cached.fill(progress=False)
    assert_same([cached[i] for i in range(LENGTH)], [image_and_label(i) for i in range(LENGTH)])


def take(duty: Any, taken: Any) -> None:
    taken.put(duty.take())
    taken.close()
    taken.join_thread()
    os._exit(0)


def test_a_duty_is_taken_once() -> None:
    from torchcache.check import Duty

    duty = Duty(5)
    context = multiprocessing.get_context("fork")
    taken = context.Queue()
    processes = [context.Process(target=take, args=(duty, taken)) for _ in range(2)]
    for process in processes:
        process.start()
    assert sorted(taken.get() for _ in processes) == [0, 5]
    for process in processes:
        process.join()
    assert duty.take() == 0
    duty = Duty(5)
    copies = [pickle.loads(pickle.dumps(duty)) for _ in range(2)]
    assert [d.take() for d in (*copies, duty)] == [5, 0, 0]


def test_equal_sets_in_another_order_are_equal() -> None:
    a, b = {8, 0}, {0, 8}
    assert list(a) != list(b)
    assert difference([1, a], [1, b]) == ""
    assert difference([1, a], [1, {0, 9}]).startswith("sample[1] is ")
    assert difference({"a": 1, "b": 2}, {"b": 2, "a": 1}).startswith("sample is ")


class Opening(Source):
    """Opens a handle at its first read, which processes must not share."""

    opened: int = 0

    def __getitem__(self, index: Any) -> Any:
        self.opened = self.opened or os.getpid()
        assert self.opened == os.getpid(), "a handle of another process"
        return super().__getitem__(index)


@pytest.mark.parametrize("use", ["fill", "loader"])
def test_a_source_is_not_opened_before_workers_are_forked(cache_dir: Path, tmp_path: Path, use: str) -> None:
    source = Opening(LENGTH, tmp_path / "reads")
    with CachedDataset(source, key="k") as cached:
        list(DataLoader(cached, sampler=range(10), batch_size=5, num_workers=1))
    assert (source.opened, source.reads().total()) == (0, 10)
    again = CachedDataset(source, key="k")
    if use == "fill":
        again.fill(num_workers=2, progress=False)
    else:
        list(torchcache.DataLoader(again, batch_size=5, num_workers=2))
    assert source.opened == 0
    assert source.reads().total() == LENGTH + 1, "compared by the first worker"
    assert again.complete


def test_a_fill_by_workers_notices_a_changed_source(filled: Source) -> None:
    filled.length += 8
    longer = CachedDataset(filled, name="b", key="k")
    longer.fill(progress=False, indices=range(8))
    longer.close()
    filled.make = other
    with pytest.raises(StaleCacheError, match="another key="):
        CachedDataset(filled, name="b", key="k").fill(num_workers=1, progress=False)
