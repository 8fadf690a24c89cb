"""CachedDataset as its users meet it."""

from __future__ import annotations

import collections
import copy
import gc
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Source, assert_same, image_and_label, open_descriptors
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, random_split

from torchcache import CacheBypassWarning, CachedDataset, buffer, collate, errors

LENGTH = 200


def ragged(index: int) -> dict[str, Any]:
    return {
        "image": torch.full((3, 2 + index % 3, 4), index, dtype=torch.uint8),
        "boxes": torch.arange(4.0 * (index % 4)).reshape(-1, 4),
        "name": "n" * (index % 5),
        "id": index,
    }


def changing(index: int) -> Any:
    return [image_and_label(index), ragged(index), torch.tensor(index), np.float32(index), None][index % 5]


MAKERS = [image_and_label, ragged, changing]


@pytest.mark.parametrize("make", MAKERS)
def test_samples_are_the_datasets_own(cache_dir: Path, tmp_path: Path, make: Any) -> None:
    source = Source(30, tmp_path / "reads", make)
    cached = CachedDataset(source, key="k")
    for expected in range(2):  # a miss, then a hit
        for index in range(30):
            assert_same(cached[index], make(index))
        assert cached.complete, expected
    cached.close()
    for index in range(30):
        assert_same(cached[index], make(index))
    assert set(source.reads().values()) == {1}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [image_and_label, changing])
def test_custom_collate_sees_ordinary_samples(cache_dir: Path, tmp_path: Path, make: Any, num_workers: int) -> None:
    cached = CachedDataset(Source(30, tmp_path / "reads", make), key="k")
    for _ in range(2):
        loader = DataLoader(cached, batch_size=8, collate_fn=_identity, num_workers=num_workers)
        batches = list(loader)
        assert all(type(batch) is list for batch in batches)
        assert_same([sample for batch in batches for sample in batch], [make(i) for i in range(30)])


def _identity(batch: Any) -> Any:
    return batch


NamedSample = collections.namedtuple("NamedSample", "x y")


def every_collatable_type(index: int) -> dict[str, Any]:
    return {
        "float32": torch.full((2, 3), float(index)),
        "bfloat16": torch.full((2,), float(index), dtype=torch.bfloat16),
        "bool": torch.tensor([index % 2 == 0]),
        "scalar tensor": torch.tensor(index, dtype=torch.int16),
        "empty": torch.empty(0, 4),
        "array": np.full((2, 2), index, np.float16),
        "big-endian": np.full((2,), index, "<u2"),
        "fortran": np.asfortranarray(np.full((2, 3), index, np.int32)),
        "transposed": (torch.arange(6.0).view(2, 3) + index).T,
        "channels last": (torch.arange(24).view(1, 2, 3, 4) + index).to(memory_format=torch.channels_last),
        "picture": (torch.arange(60, dtype=torch.uint8).view(4, 5, 3) + index).permute(2, 0, 1),
        "turned bfloat16": (torch.arange(24.0).view(2, 3, 4) + index).to(torch.bfloat16).permute(1, 2, 0),
        "numpy scalar": np.float32(index),
        "numpy bool": np.bool_(index % 2),
        "numpy int": np.uint16(index),
        "nested": [NamedSample(index, float(index)), (str(index), b"x" * index), {"flag": index % 2 == 0}],
        "ordered": collections.OrderedDict(a=index),
    }


@pytest.mark.parametrize("num_workers", [0, 2])
def test_default_collate_gives_the_same_batches(cache_dir: Path, tmp_path: Path, num_workers: int) -> None:
    source = Source(20, tmp_path / "reads", every_collatable_type)
    expected = list(DataLoader(source, batch_size=6, num_workers=num_workers))
    cached = CachedDataset(source, key="k")
    for _ in range(2):
        for got, want in zip(DataLoader(cached, batch_size=6, num_workers=num_workers), expected, strict=True):
            assert_same(got, want)


@pytest.mark.parametrize("make", [lambda i: None, lambda i: (i, 1j), lambda i: [0] * (i + 1), ragged, changing])
def test_default_collate_fails_as_without_the_cache(cache_dir: Path, tmp_path: Path, make: Any) -> None:
    source = Source(8, tmp_path / "reads", make)
    with pytest.raises(Exception) as expected:
        list(DataLoader(source, batch_size=8))
    cached = CachedDataset(source, key="k")
    cached.fill(progress=False)
    with pytest.raises(type(expected.value)) as error:
        list(DataLoader(cached, batch_size=8))
    assert str(error.value) == str(expected.value)


def test_a_collate_function_of_the_users_for_a_type(cache_dir: Path, tmp_path: Path) -> None:
    from torch.utils.data._utils.collate import default_collate_fn_map

    source = Source(8, tmp_path / "reads", image_and_label)
    cached = CachedDataset(source, key="k")
    cached.fill(progress=False)
    default_collate_fn_map[tuple] = lambda batch, *, collate_fn_map=None: ("mine", len(batch))
    try:
        assert list(DataLoader(cached, batch_size=4)) == list(DataLoader(source, batch_size=4)) == [("mine", 4)] * 2
    finally:
        del default_collate_fn_map[tuple]


class Foreign:
    """A class of another library, which has told PyTorch how to collate it."""


class ForeignTensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("key", "gathers"),
    [
        (Foreign, True),
        ((Foreign, UserWarning), True),
        (ForeignTensor, False),
        (collections.abc.Mapping, False),
        ((Foreign, list), False),
        (object, False),
    ],
)
def test_other_libraries_collate_functions(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: Any, gathers: bool
) -> None:
    """Those for classes of their own, as tensordict's, slow no batch of others; those that may meet ours are used."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    source = Source(8, tmp_path / "reads", image_and_label)
    cached = CachedDataset(source, key="k")
    cached.fill(progress=False)
    monkeypatch.setitem(default_collate_fn_map, key, lambda batch, *, collate_fn_map=None: "theirs")
    assert collate.is_default() == gathers
    assert_same(list(DataLoader(cached, batch_size=4)), list(DataLoader(source, batch_size=4)))


@pytest.mark.parametrize(
    "wrap", [lambda ds: Subset(ds, range(0, 100, 3)), lambda ds: Subset(Subset(ds, range(99)), [5, 1])]
)
def test_subsets_gather(cache_dir: Path, source: Source, wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = CachedDataset(source)
    cached.fill(progress=False)
    monkeypatch.setattr("torchcache.reader.Reader.value", None)  # no sample may be made one by one
    for got, want in zip(DataLoader(wrap(cached), batch_size=8), DataLoader(wrap(source), batch_size=8), strict=True):
        assert_same(got, want)


def test_random_split_and_concat(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source)
    parts = random_split(cached, [150, 50], generator=torch.Generator().manual_seed(0))
    assert sorted(int(y) for part in parts for _, y in part) == sorted(i % 10 for i in range(LENGTH))
    both = ConcatDataset([cached, cached])
    assert_same(both[LENGTH + 3], image_and_label(3))
    assert_same(next(iter(DataLoader(both, batch_size=300)))[1], torch.arange(300) % LENGTH % 10)


def test_duplicates_in_a_batch_are_objects_of_their_own(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source)
    for _ in range(2):
        batch = cached.__getitems__([7, 7, -193])
        batch[0][0].zero_()
        assert_same(batch[1:], [image_and_label(7)] * 2)
    assert source.reads()[7] == 1


def test_changes_to_a_sample_are_not_seen_again(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source)
    for read in (lambda: cached[3], lambda: cached.__getitems__([3])[0]):
        for _ in range(3):
            sample = read()
            assert_same(sample, image_and_label(3))
            sample[0].zero_()


@pytest.mark.parametrize("index", [3, np.int64(3), np.uint8(3), torch.tensor(3), -197, np.int32(-197)])
def test_index_types(cache_dir: Path, source: Source, index: Any) -> None:
    cached = CachedDataset(source)
    for _ in range(2):
        assert_same(cached[index], image_and_label(3))
        assert_same(cached.__getitems__([index, index])[1], image_and_label(3))
    assert source.reads() == {3: 1}


def test_what_is_no_plain_index_is_not_cached_under_one(cache_dir: Path) -> None:
    source = TensorDataset(torch.arange(12).reshape(4, 3))
    cached = CachedDataset(source)
    for _ in range(2):
        for index in (True, torch.tensor([2]), np.array([1])):
            assert_same(cached[index], source[index])
        cached.fill(progress=False)
    assert_same([cached[i] for i in range(4)], [source[i] for i in range(4)])


class TellsItsIndex(Source):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index), index


def test_every_form_of_an_index_gives_the_same_sample(cache_dir: Path, tmp_path: Path) -> None:
    cached = CachedDataset(TellsItsIndex(5, tmp_path / "reads"), key="k")
    for index in (-1, np.int64(4), torch.tensor(4), 4):
        assert_same(cached[index][1], 4)
    cached.fill(progress=False)
    for batch in (torch.tensor([0, -1]), torch.tensor([0, 4], dtype=torch.uint8), [0, -1], np.array([0, 4])):
        assert [index for _, index in cached.__getitems__(batch)] == [0, 4]
        loader = DataLoader(cached, batch_sampler=[batch])
        assert next(iter(loader))[1].tolist() == [0, 4]


def test_another_default_device(cache_dir: Path, source: Source) -> None:
    """As under ``torch.set_default_device("cuda")``: what the cache makes for itself stays on the CPU."""
    torch.set_default_device("meta")
    try:
        cached = CachedDataset(source, key="k")
        for _ in range(2):
            for first in range(0, LENGTH, 50):
                assert_same(
                    cached.__getitems__(list(range(first, first + 50))),
                    [image_and_label(i) for i in range(first, first + 50)],
                )
            assert cached.complete
            cached.close()
        assert_same(cached[150], image_and_label(150))
    finally:
        torch.set_default_device(None)


def test_the_job_may_change_its_folder(tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    cached = CachedDataset(source, cache_dir="relative")
    cached[0]
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert sum(1 for _ in cached) == LENGTH
    assert cached.path.parent == tmp_path / "relative"


def test_single_samples_are_kept_though_the_dataset_is_dropped(cache_dir: Path, source: Source) -> None:
    first = CachedDataset(source)
    for i in range(10):
        first[i]
    assert first._connection._cache is not None
    flusher = first._connection._cache.filler._flusher
    del first
    gc.collect()
    if flusher is not None:
        flusher._thread.join()
    assert CachedDataset(source).stats.samples_cached == 10


def test_empty_numpy_strings(cache_dir: Path) -> None:
    texts = np.array(["cat", "", "dog"])
    source = [{"caption": texts[i], "bytes": np.bytes_(b""), "label": i + 1} for i in range(3)]
    cached = CachedDataset(source)
    for _ in range(2):
        assert_same([cached[i] for i in range(3)], source)
        cached.fill(progress=False)


def test_lists_of_many_lengths(cache_dir: Path) -> None:
    source = [{"ids": list(range(i * 20)), "label": i} for i in range(12)]
    cached = CachedDataset(source)
    cached.fill(progress=False)
    cached.close()
    assert_same([cached[i] for i in range(12)], source)
    long = CachedDataset([list(range(70_000)), [None, 1.5] * 2_000, ["x"] * 2_000], name="long")
    long.fill(progress=False)
    assert_same([long[i] for i in range(3)], long.dataset)
    with pytest.raises(errors.UnsupportedSampleError, match="too long; make it a tensor or an array"):
        CachedDataset([["x", b"x"] * 1_000], name="mixed")[0]


@pytest.mark.parametrize("index", [LENGTH, -LENGTH - 1, 10**30])
def test_out_of_range(cache_dir: Path, source: Source, index: int) -> None:
    cached = CachedDataset(source)
    for _ in range(2):
        with pytest.raises(IndexError, match="out of range for a dataset of 200 samples"):
            cached[index]
        with pytest.raises(IndexError, match="out of range"):
            cached.__getitems__([0, index])
        cached.fill(progress=False)


def test_iteration_ends(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source)
    assert sum(1 for _ in cached) == LENGTH
    assert sum(1 for _ in cached) == LENGTH


def test_slices_and_lists_are_the_datasets_business(cache_dir: Path) -> None:
    source = TensorDataset(torch.arange(10))
    cached = CachedDataset(source)
    assert_same(cached[2:4], source[2:4])
    assert_same(cached[[1, 2]], source[[1, 2]])
    with pytest.raises(IndexError):
        cached[1.5]
    assert cached.stats.samples_cached == 0
    with pytest.raises(TypeError, match="single samples"):
        CachedDataset(source, transform=len)[2:4]


def test_transform_is_applied_on_every_read(cache_dir: Path, source: Source) -> None:
    calls = []
    cached = CachedDataset(source, transform=lambda sample: calls.append(1) or (sample[0] + len(calls), sample[1]))
    for call in range(1, 4):
        assert torch.equal(cached[5][0], image_and_label(5)[0] + call)
    assert len(next(iter(DataLoader(cached, batch_size=4)))) == 2
    assert source.reads()[5] == 1
    assert len(calls) == 7


def test_without_copy_tensors_are_views(cache_dir: Path, tmp_path: Path) -> None:
    source = Source(4, tmp_path / "reads", lambda i: (torch.full((8,), float(i)), np.full(8, i)))
    with CachedDataset(source, key="k", copy=False) as cached:
        cached.fill(progress=False)
        tensor, array = cached[2]
        assert not array.flags.writeable
        tensor.fill_(9)  # neither a crash nor a change of the file
        assert torch.equal(cached[2][0], tensor)
    assert torch.equal(CachedDataset.open(cached.path)[2][0], torch.full((8,), 2.0))


def test_views_outlive_the_dataset(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source, copy=False)
    cached.fill(progress=False)
    views = [cached[i] for i in range(8)]
    cached.close()
    del cached
    gc.collect()
    assert_same(views, [image_and_label(i) for i in range(8)])


def test_an_in_place_transform_is_caught(cache_dir: Path, source: Source) -> None:
    def double(sample: Any) -> Any:
        return sample[0].mul_(2), sample[1]

    cached = CachedDataset(source, transform=double, copy=False)
    cached.fill(progress=False)
    with pytest.raises(errors.InPlaceWriteError, match=r"double.*copy=True"):
        cached[1]
    assert torch.equal(CachedDataset(source, transform=double)[2][0], 2 * image_and_label(2)[0])


def test_max_bytes_stops_admitting(cache_dir: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "ENOUGH_SAMPLES", 10)  # each batch becomes a block
    cached = CachedDataset(source, max_bytes=20_000)
    with pytest.warns(CacheBypassWarning, match=r"max_bytes=20000 is reached.*read from the source") as caught:
        first = list(DataLoader(cached, batch_size=10))
    assert len(caught) == 1
    second = list(DataLoader(cached, batch_size=10))
    assert_same(second, list(DataLoader(Source(LENGTH, source.log), batch_size=10)))
    assert_same(first, second)
    assert 0 < cached.stats.samples_cached < LENGTH
    assert cached.stats.bytes_cached <= 20_000
    assert not cached.complete


def test_stats(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source)
    assert cached.stats.samples_cached == 0
    for _ in range(2):
        list(DataLoader(cached, batch_size=10))
    stats = cached.stats
    assert (stats.hits, stats.misses, stats.source_reads, stats.duplicate_reads) == (LENGTH, LENGTH, LENGTH, 0)
    assert (stats.samples_cached, cached.complete) == (LENGTH, True)
    assert stats.bytes_cached >= LENGTH * (192 + 8)
    assert stats.source_seconds > 0
    cached.close()
    assert CachedDataset(source).stats.source_reads == LENGTH


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fill(cache_dir: Path, source: Source, num_workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.get_rng_state()
    cached = CachedDataset(source)
    cached[150]
    cached.fill(num_workers=num_workers)
    assert cached.complete
    assert set(source.reads().values()) == {1}
    assert torch.equal(torch.get_rng_state(), state)
    cached.fill()
    assert capsys.readouterr().err == ""  # no terminal, no bar


def test_a_sealed_store_needs_one_file(cache_dir: Path, source: Source, tmp_path: Path) -> None:
    cached = CachedDataset(source)
    cached.fill(progress=False)
    cached.close()
    (tmp_path / "elsewhere").mkdir()
    os.rename(cached.path / "data.mdb", tmp_path / "elsewhere" / "data.mdb")
    opened = CachedDataset.open(tmp_path / "elsewhere")
    assert len(opened) == LENGTH
    assert_same([opened[i] for i in range(LENGTH)], [image_and_label(i) for i in range(LENGTH)])
    with pytest.raises(IndexError):
        opened[LENGTH]
    with pytest.raises(TypeError, match="opened without its dataset"):
        opened["x"]


def test_open_wants_a_complete_store(cache_dir: Path, source: Source, tmp_path: Path) -> None:
    cached = CachedDataset(source)
    cached[0]
    cached.close()
    with pytest.raises(errors.StoreUnavailableError, match=r"1 of 200 samples.*fill"):
        CachedDataset.open(cached.path)
    with pytest.raises(errors.NotAStoreError, match="holds no store"):
        CachedDataset.open(tmp_path)


def test_an_empty_dataset(cache_dir: Path, tmp_path: Path) -> None:
    cached = CachedDataset(Source(0, tmp_path / "reads"))
    cached.fill(progress=False)
    assert (len(cached), list(cached), cached.complete) == (0, [], True)


def test_a_dataset_that_grows(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source)
    cached.fill(progress=False)
    source.length += 4
    assert len(cached) == LENGTH + 4
    for _ in range(2):
        assert_same(cached[LENGTH + 2], image_and_label(LENGTH + 2))
        assert_same(cached.__getitems__([LENGTH + 3, 0])[1], image_and_label(0))
    assert sum(1 for _ in cached) == LENGTH + 4


def test_attributes_fall_through(cache_dir: Path, source: Source) -> None:
    source.classes = ["a", "b"]  # type: ignore[attr-defined]
    cached = CachedDataset(source)
    assert cached.classes == ["a", "b"]
    with pytest.raises(AttributeError, match="no_such"):
        _ = cached.no_such
    assert not hasattr(cached, "__array__")


def test_pickles_as_settings(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source, max_bytes=1 << 30, copy=False)
    empty = len(pickle.dumps(cached))
    cached.fill(progress=False)
    assert abs(len(pickle.dumps(cached)) - empty) < 100
    for other in (pickle.loads(pickle.dumps(cached)), copy.deepcopy(cached)):
        assert_same(other[3], image_and_label(3))
        assert other.path == cached.path
    assert pickle.loads(pickle.dumps(CachedDataset.open(cached.path)))[5][1] == 5
    assert set(source.reads().values()) == {1}


def test_two_datasets_on_one_store(cache_dir: Path, source: Source) -> None:
    a, b = CachedDataset(source), CachedDataset(source)
    a[0], b[0]
    a.fill(progress=False)
    assert b.complete
    del a
    gc.collect()
    assert_same(b[1], image_and_label(1))
    assert set(source.reads().values()) == {1}


def test_two_threads(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source)
    failures: list[BaseException] = []

    def read(step: int) -> None:
        try:
            for i in range(LENGTH):
                index = i * step % LENGTH
                assert_same(cached[index], image_and_label(index))
        except BaseException as error:  # reported by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=read, args=(step,)) for step in (1, 3, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert set(source.reads().values()) == {1}


def test_train_and_validation_under_one_folder(cache_dir: Path, tmp_path: Path) -> None:
    a = CachedDataset(Source(10, tmp_path / "a", lambda i: ("A", i)))
    b = CachedDataset(Source(10, tmp_path / "b", lambda i: ("B", i)))
    assert a.path != b.path
    for _ in range(2):
        assert [a[i][0] for i in range(10)] == ["A"] * 10
        assert [b[i][0] for i in range(10)] == ["B"] * 10


def test_descriptors_are_given_back(cache_dir: Path, source: Source) -> None:
    gc.collect()
    before = open_descriptors()
    cached = [CachedDataset(source, name=f"n{i}", key="k") for i in range(10)]
    for one in cached:
        one[0]
        one.close()
    del cached, one
    gc.collect()
    assert open_descriptors() <= before


def test_names_and_keys_become_folder_names(cache_dir: Path, source: Source) -> None:
    for name, key in [
        ("n" * 500, "k" * 500),
        ("../../etc", "../x"),
        ("数据 a\nb", "é"),
        (".", ".."),
        ("a/b", "\ud800"),
    ]:
        cached = CachedDataset(source, name=name, key=key)
        cached[0]
        assert cached.path.parent == cache_dir
        assert len(cached.path.name) <= 130
        cached.close()
    assert len(list(cache_dir.iterdir())) == 5


@pytest.mark.parametrize("form", [str, os.fsencode, Path])
def test_odd_cache_folders(tmp_path: Path, source: Source, form: Any) -> None:
    folder = tmp_path / "Benoît 数据 a b\n'$x"
    cached = CachedDataset(source, cache_dir=form(folder))
    cached.fill(progress=False)
    assert cached.path.parent == folder
    assert CachedDataset.open(form(cached.path))[0][1] == 0


def test_cache_dir_is_read_when_the_object_is_made(tmp_path: Path, source: Source, monkeypatch: Any) -> None:
    monkeypatch.setenv("CACHE_DIR", str(tmp_path / "one"))
    one = CachedDataset(source)
    monkeypatch.setenv("CACHE_DIR", str(tmp_path / "two"))
    assert one.path.parent == tmp_path / "one"
    assert CachedDataset(source).path.parent == tmp_path / "two"
    monkeypatch.delenv("CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "three"))
    assert CachedDataset(source).path.is_relative_to(tmp_path / "three")


class Iterable(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class FloatLength(NoLength):
    def __len__(self) -> int:
        return 2.5  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Iterable(), r"iterable dataset Iterable.*CachedDataset\(list\(dataset\)\)"),
        (Source, r"the class Source.*CachedDataset\(Source\(...\)\)"),
        (NoLength(), r"NoLength without a usable __len__"),
        (FloatLength(), r"FloatLength without a usable __len__"),
        (iter([1]), "no __getitem__"),
        ({"a": 1}, "not indexed by 0, 1, 2"),
        (None, "NoneType, which has no __getitem__"),
        (5, "int, which has no __getitem__"),
    ],
)
def test_not_a_map_style_dataset(cache_dir: Path, dataset: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        CachedDataset(dataset)
    assert not cache_dir.exists()


def test_a_list_is_a_dataset(cache_dir: Path) -> None:
    cached = CachedDataset([(1, "a"), (2, "b")])
    assert [cached[i] for i in (0, 1, 0)] == [(1, "a"), (2, "b"), (1, "a")]


@pytest.mark.parametrize(
    "read", [lambda ds: ds[3], lambda ds: ds.__getitems__([1, 2, 3]), lambda ds: ds.fill(progress=False)]
)
def test_unsupported_types_leave_no_folder(cache_dir: Path, tmp_path: Path, read: Any) -> None:
    cached = CachedDataset(Source(10, tmp_path / "reads", lambda i: {"a": [i, object()]}), key="k")
    with pytest.raises(errors.UnsupportedSampleError, match=r"sample\['a'\]\[1\]: builtins.object .*Convert it"):
        read(cached)
    assert list(cache_dir.iterdir()) == []


def test_one_unsupported_sample_keeps_the_others(cache_dir: Path, tmp_path: Path) -> None:
    source = Source(10, tmp_path / "reads", lambda i: object() if i == 5 else i)
    cached = CachedDataset(source, key="k")
    cached[1]
    for _ in range(2):
        with pytest.raises(errors.UnsupportedSampleError):
            cached[5]
    assert cached.stats.samples_cached == 1


def test_random_samples_are_refused(cache_dir: Path, tmp_path: Path) -> None:
    source = Source(10, tmp_path / "reads", lambda i: torch.rand(2))
    with pytest.raises(errors.RandomSampleError, match="transform="):
        CachedDataset(source, key="k")[0]
    with pytest.warns(errors.RandomSampleWarning):
        CachedDataset(source, key="w", on_random="warn")[0]
    frozen = CachedDataset(source, key="a", on_random="allow")
    assert torch.equal(frozen[0], frozen[0])
