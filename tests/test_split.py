"""``CachedDataset.split``: the part before the first random step is cached, and all is as without the cache."""

from __future__ import annotations

import pickle
import random
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same
from test_torchvision_datasets import DATASETS
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision import datasets as tv
from torchvision import transforms as v1
from torchvision.transforms import v2

from torchcache import CachedDataset, UnsupportedSampleError

V1 = v1.Compose([v1.Resize(8), v1.ToTensor(), v1.RandomCrop(5), v1.RandomApply([v1.Pad(1)])])
V1_TENSOR = v1.Compose([v1.Pad(1), v1.RandomCrop(5)])
V2 = v2.Compose([v2.ToImage(), v2.Compose([v2.Resize(8), v2.RandomCrop(5)]), v2.ToDtype(torch.float32, scale=True)])
Pair = namedtuple("Pair", ["image", "label"])


def swapped(label: Any) -> Any:
    return label + int(torch.randint(5, ()))


def jitter(image: Any, target: Any) -> Any:
    return image + random.random(), target


def with_attributes(name: str, **attributes: Any) -> Callable[[Path], Any]:
    def build(root: Path) -> Any:
        dataset = DATASETS[name](root)
        for attribute, value in attributes.items():
            setattr(dataset, attribute, value)
        return dataset

    return build


def standard(root: Path) -> Any:
    """Its own attributes are not what is called, ``transforms`` is."""
    dataset = DATASETS["CocoDetection"](root)
    return tv.CocoDetection(
        dataset.root, str(root / "annotations.json"), V1, lambda target: (len(target), np.random.rand())
    )


def wrapped(name: str, pipeline: Any) -> Callable[[Path], Any]:
    return lambda root: tv.wrap_dataset_for_transforms_v2(with_attributes(name, transforms=pipeline)(root))


class Odd(Dataset[Any]):
    """Calls its transforms more than once a sample, in an order of its own, and puts the results where it likes."""

    def __init__(self, transform: Any, target_transform: Any) -> None:
        self.transform, self.target_transform = transform, target_transform

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        label = self.target_transform(index)
        image = self.transform(torch.full((1, 9, 9), float(index)))
        frames = [self.transform(torch.full((1, 9, 9), float(i))) for i in range(index % 3)]
        return {"frames": frames, "fixed": (1, index)}, Pair(image, label), image


BOXES = v2.Compose(
    [v2.ToImage(), v2.Resize((16, 16)), v2.RandomHorizontalFlip(), v2.RandomCrop(8), v2.SanitizeBoundingBoxes()]
)
CASES: dict[str, Callable[[Path], Any]] = {
    "v1": with_attributes("ImageFolder", transform=V1),
    "v2": with_attributes("MNIST", transform=V2),
    "target": with_attributes("ImageFolder", transform=V2, target_transform=swapped),
    "target alone": with_attributes("MNIST", target_transform=swapped),
    "all random": with_attributes("CIFAR10", transform=v2.Compose([v2.RandomHorizontalFlip(), v2.PILToTensor()])),
    "image alone": with_attributes("MovingMNIST", transform=v2.RandomCrop(40)),
    "joint": with_attributes("VOCSegmentation", transforms=v2.Compose([v2.PILToTensor(), v2.RandomCrop(3), v2.Pad(1)])),
    "joint, of one's own": with_attributes("TensorDataset-like", transforms=jitter),
    "standard": standard,
    "wrapped": wrapped("VOCDetection", BOXES),
    "odd": lambda root: Odd(v1.Compose([v1.Pad(1), v1.RandomCrop(5)]), swapped),
}


class Pairs(Dataset[Any]):
    def __init__(self) -> None:
        self.transforms: Any = None

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        image, target = self.transforms(torch.full((2,), float(index)), {"id": index})
        return {"image": image, "target": target}


DATASETS = {**DATASETS, "TensorDataset-like": lambda root: Pairs()}


def epoch(dataset: Any, num_workers: int, batch_size: int | None = 2) -> list[Any]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    return list(DataLoader(dataset, batch_size, shuffle=True, num_workers=num_workers, collate_fn=unchanged))


def unchanged(samples: Any) -> Any:
    return samples


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("build", CASES.values(), ids=CASES)
def test_equal_seeds_give_equal_results(cache_dir: Path, tmp_path: Path, build: Callable[[Path], Any]) -> None:
    bare = build(tmp_path / "data")
    pipelines = {name: getattr(bare, name, None) for name in ("transform", "target_transform", "transforms")}
    cached = CachedDataset.split(bare)
    assert pipelines == {name: getattr(bare, name, None) for name in pipelines}
    expected = epoch(bare, 0)
    for _ in range(2):  # cold, warm
        assert_same(epoch(cached, 0), expected)
    assert cached.complete
    assert cached.stats.source_reads == len(bare)
    again = CachedDataset.split(build(tmp_path / "again"), key=cached._connection._identity.key, check=0)
    assert_same(epoch(again, 0, None), epoch(bare, 0, None))


@pytest.mark.parametrize("name", ["v1", "wrapped"])
def test_equal_seeds_give_equal_results_in_workers(cache_dir: Path, tmp_path: Path, name: str) -> None:
    bare = CASES[name](tmp_path / "data")
    cached = CachedDataset.split(bare)
    expected = epoch(bare, 2)
    for _ in range(2):
        assert_same(epoch(cached, 2), expected)
    assert cached.complete


def test_the_random_part_is_no_part_of_the_identity(cache_dir: Path, tmp_path: Path) -> None:
    def image_folder(*steps: Any) -> CachedDataset:
        return CachedDataset.split(with_attributes("ImageFolder", transform=v1.Compose(steps))(tmp_path / "data"))

    stores = [
        image_folder(v1.Resize(8), v1.ToTensor(), v1.RandomCrop(5)),
        image_folder(v1.Resize(8), v1.ToTensor(), v1.RandomCrop(6)),
        image_folder(v1.Resize(9), v1.ToTensor(), v1.RandomCrop(5)),
    ]
    assert stores[0].path == stores[1].path != stores[2].path
    assert stores[0].path.name.startswith("ImageFolder-")
    stores[0].fill(progress=False)
    assert stores[1].complete
    assert stores[1][0][0].shape == (3, 6, 6)


def test_without_a_random_step_it_is_an_ordinary_one(cache_dir: Path, tmp_path: Path) -> None:
    dataset = DATASETS["ImageFolder"](tmp_path / "data")
    split = CachedDataset.split(dataset, max_bytes=1 << 30)
    assert (split.dataset, split.path) == (dataset, CachedDataset(dataset).path)
    assert split.transform is None


def test_it_is_a_dataset_like_any_other(cache_dir: Path, tmp_path: Path) -> None:
    bare = with_attributes("ImageFolder", transform=V1)(tmp_path / "data")
    cached = CachedDataset.split(bare, name="train", copy=False)
    assert cached.path.name.startswith("train-")
    assert (len(cached), cached.classes, cached.targets) == (len(bare), bare.classes, bare.targets)
    assert repr(bare.root) in repr(cached) or "Root location" in repr(cached)
    assert_same(epoch(Subset(cached, [3, 1]), 0), epoch(Subset(bare, [3, 1]), 0))
    assert_same(epoch(pickle.loads(pickle.dumps(cached)), 0), epoch(bare, 0))
    with pytest.raises(AttributeError):
        cached.nothing_of_the_kind  # noqa: B018


class Batched(Odd):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def test_samples_that_are_read_together(cache_dir: Path) -> None:
    cached = CachedDataset.split(Batched(V1_TENSOR, swapped))
    for _ in range(2):
        assert_same(epoch(cached, 0), epoch(Odd(V1_TENSOR, swapped), 0))


class Uses(Odd):
    """Does something with what its transform gives."""

    def __init__(self, use: Callable[[Any], Any]) -> None:
        super().__init__(V1_TENSOR, None)
        self.use = use

    def __getitem__(self, index: int) -> Any:
        return self.use(lambda: self.transform(torch.full((1, 9, 9), float(index))))


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (lambda apply: apply() / 255, "uses what its transform gives"),
        (lambda apply: apply().shape, "uses what its transform gives"),
        (lambda apply: torch.stack([apply(), apply()]), "uses what its transform gives"),
        (lambda apply: np.array(apply()), "do not hold"),
        (lambda apply: {apply(): 1}, "do not hold"),
        (lambda apply: apply() and 1, "do not hold"),
    ],
)
def test_what_cannot_be_split_is_refused(cache_dir: Path, use: Any, why: str) -> None:
    cached = CachedDataset.split(Uses(use))
    for read in (lambda: cached[0], lambda: cached.fill(progress=False)):
        with pytest.raises(UnsupportedSampleError, match=rf"{why}.*transform=\.\.\."):
            read()


class Applies(Odd):
    def __getitem__(self, index: int) -> Any:
        return self.transform(image=index)


class AppliesTwo(Odd):
    def __getitem__(self, index: int) -> Any:
        return self.target_transform(self.transform(torch.zeros(1, 9, 9)))


def test_calls_that_cannot_be_split_are_refused(cache_dir: Path) -> None:
    for dataset, why in (
        (Applies(V1_TENSOR, None), "by keyword"),
        (AppliesTwo(V1_TENSOR, V1_TENSOR), "with the result of another"),
    ):
        with pytest.raises(UnsupportedSampleError, match=why):
            CachedDataset.split(dataset)[0]


def test_an_error_of_the_dataset_is_its_own(cache_dir: Path) -> None:
    def fail(apply: Any) -> Any:
        apply()
        raise AttributeError("of the dataset")

    with pytest.raises(AttributeError, match=r"^of the dataset$"):
        CachedDataset.split(Uses(fail))[0]


@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(3)), Subset(Odd(V1, None), [0]), [1]])
def test_a_dataset_without_transforms_is_refused(cache_dir: Path, dataset: Any) -> None:
    with pytest.raises(TypeError, match="no transform, target_transform or transforms"):
        CachedDataset.split(dataset)


def test_bad_arguments(cache_dir: Path) -> None:
    with pytest.raises(TypeError, match="put yours at its end"):
        CachedDataset.split(Odd(V1_TENSOR, None), transform=V1)


def test_a_source_whose_store_is_lost_goes_on(cache_dir: Path) -> None:
    bare = Odd(V1_TENSOR, swapped)
    cached = CachedDataset.split(bare, max_bytes=1)
    with pytest.warns(UserWarning, match="max_bytes=1 is reached"):
        found = [epoch(cached, 0) for _ in range(2)]
    assert_same(found, [epoch(bare, 0)] * 2)
