"""Datasets that we did not write, fed from generated folders: bare equals wrapped, item by item and batch by batch."""

from __future__ import annotations

import csv
import json
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, StackDataset, Subset, TensorDataset, default_collate
from torchvision import datasets as tv
from torchvision.transforms import v2

from torchcache import CachedDataset
from torchcache.source import batched_read

COUNT = 5  # samples of a dataset
to_tensor = v2.PILToTensor()


def picture(path: Path, i: int, *, mode: str = "RGB", size: tuple[int, int] = (6, 5)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(i).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(path)


def text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def idx(path: Path, array: np.ndarray[Any, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {"uint8": 8, "int32": 12}[array.dtype.name]
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    path.write_bytes(head + array.astype(array.dtype.newbyteorder(">")).tobytes())


def images(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 255, (COUNT, *shape), dtype=np.uint8)


LABELS = np.arange(COUNT, dtype=np.uint8) % 3


def fake(root: Path) -> Any:
    return tv.FakeData(COUNT, (3, 6, 5), 3, transform=to_tensor)


def image_folder(root: Path) -> Any:
    for i in range(COUNT):
        picture(root / "ab"[i % 2] / f"{i}.png", i)
    return tv.ImageFolder(str(root), transform=to_tensor)


def dataset_folder(root: Path) -> Any:
    for i in range(COUNT):
        (root / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        np.save(root / "ab"[i % 2] / f"{i}.npy", np.full((2, 3), i, ">f4"))
    return tv.DatasetFolder(str(root), np.load, extensions=(".npy",), transform=lambda x: x.astype("f4"))


def mnist_like(cls: Any) -> Callable[[Path], Any]:
    def build(root: Path) -> Any:
        raw = root / cls.__name__ / "raw"
        for split in ("train", "t10k"):
            idx(raw / f"{split}-images-idx3-ubyte", images(28, 28))
            idx(raw / f"{split}-labels-idx1-ubyte", LABELS)
        return cls(str(root), train=True, transform=to_tensor)

    return build


def emnist(root: Path) -> Any:
    raw = root / "EMNIST" / "raw"
    for split in ("train", "test"):
        idx(raw / f"emnist-letters-{split}-images-idx3-ubyte", images(28, 28))
        idx(raw / f"emnist-letters-{split}-labels-idx1-ubyte", LABELS)
    return tv.EMNIST(str(root), "letters", transform=to_tensor)


def qmnist(root: Path) -> Any:
    idx(root / "QMNIST" / "raw" / "qmnist-train-images-idx3-ubyte", images(28, 28))
    idx(root / "QMNIST" / "raw" / "qmnist-train-labels-idx2-int", np.tile(LABELS.astype("i4")[:, None], (1, 8)))
    return tv.QMNIST(str(root), "train", compat=False, transform=to_tensor)


def moving_mnist(root: Path) -> Any:
    folder = root / "MovingMNIST"
    folder.mkdir(parents=True)
    np.save(folder / "mnist_test_seq.npy", np.zeros((20, COUNT, 64, 64), np.uint8) + np.arange(COUNT)[:, None, None])
    return tv.MovingMNIST(str(root))


class Cifar10(tv.CIFAR10):
    """Whose files need not be the published ones."""

    train_list = [["batch", None]]  # noqa: RUF012
    test_list = train_list
    meta = {"filename": "meta", "key": "label_names", "md5": None}  # noqa: RUF012


class Cifar100(tv.CIFAR100):
    train_list = [["batch", None]]  # noqa: RUF012
    test_list = train_list
    meta = {"filename": "meta", "key": "fine_label_names", "md5": None}  # noqa: RUF012


def cifar(cls: Any, labels: str) -> Callable[[Path], Any]:
    def build(root: Path) -> Any:
        folder = root / cls.base_folder
        folder.mkdir(parents=True)
        batch = {"data": images(3072), labels: LABELS.tolist()}
        (folder / "batch").write_bytes(pickle.dumps(batch))
        (folder / "meta").write_bytes(pickle.dumps({cls.meta["key"]: ["a", "b", "c"]}))
        return cls(str(root), transform=to_tensor)

    return build


class Stl10(tv.STL10):
    def _check_integrity(self) -> bool:
        return True


def stl10(root: Path) -> Any:
    folder = root / tv.STL10.base_folder
    folder.mkdir(parents=True)
    (folder / "train_X.bin").write_bytes(images(3, 96, 96).tobytes())
    (folder / "train_y.bin").write_bytes((LABELS + 1).tobytes())
    text(folder / "class_names.txt", "a\nb\nc\n")
    return Stl10(str(root), transform=to_tensor)


VOC_OBJECT = "<object><name>{}</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>4</xmax><ymax>3</ymax></bndbox></object>"


def voc(cls: Any, folder: str, kind: str) -> Callable[[Path], Any]:
    def build(root: Path) -> Any:
        base = root / "VOCdevkit" / "VOC2012"
        text(base / "ImageSets" / kind / "train.txt", "".join(f"{i}\n" for i in range(COUNT)))
        for i in range(COUNT):
            picture(base / "JPEGImages" / f"{i}.jpg", i)
            picture(base / "SegmentationClass" / f"{i}.png", i, mode="L")
            objects = "".join(VOC_OBJECT.format(name) for name in ["person", "dog"][: 1 + i % 2])
            text(base / "Annotations" / f"{i}.xml", f"<annotation><filename>{i}.jpg</filename>{objects}</annotation>")
        masks = cls is tv.VOCSegmentation
        return cls(str(root), image_set="train", transform=to_tensor, target_transform=to_tensor if masks else None)

    return build


def kitti(root: Path) -> Any:
    raw = root / "Kitti" / "raw" / "training"
    for i in range(COUNT):
        picture(raw / "image_2" / f"{i:06}.png", i)
        text(raw / "label_2" / f"{i:06}.txt", "Car 0.0 0 1.5 1 2 3 4 1.5 1.6 3.7 1.0 2.0 8.4 0.01\n" * (1 + i % 3))
    return tv.Kitti(str(root), transform=to_tensor)


class CelebA(tv.CelebA):
    def _check_integrity(self) -> bool:
        return True


def celeba(root: Path) -> Any:
    base = root / tv.CelebA.base_folder
    names = [f"{i:06}.jpg" for i in range(COUNT)]
    for i, name in enumerate(names):
        picture(base / "img_align_celeba" / name, i)
    text(base / "list_eval_partition.txt", "".join(f"{name} 0\n" for name in names))
    text(base / "identity_CelebA.txt", "".join(f"{name} {i}\n" for i, name in enumerate(names)))
    for file, head, values in (
        ("list_bbox_celeba.txt", "image_id x_1 y_1 width height", "1 2 3 2"),
        ("list_landmarks_align_celeba.txt", " ".join(f"l{k}" for k in range(10)), " ".join("1" * 10)),
        ("list_attr_celeba.txt", "Bald Young", "-1 1"),
    ):
        text(base / file, f"{COUNT}\n{head}\n" + "".join(f"{name} {values}\n" for name in names))
    return CelebA(str(root), target_type=["identity", "bbox"], transform=to_tensor)


def coco(root: Path) -> Any:
    pytest.importorskip("pycocotools")
    for i in range(COUNT):
        picture(root / f"{i}.jpg", i)
    content = {
        "images": [{"id": i, "file_name": f"{i}.jpg", "height": 5, "width": 6} for i in range(COUNT)],
        "annotations": [
            {
                "id": 10 * i + k,
                "image_id": i,
                "category_id": k + 1,
                "bbox": [0.5, 1.0, 2.0, 2],
                "area": 4.0,
                "iscrowd": 0,
                "segmentation": [[0.5, 1.0, 2.5, 1.0, 2.5, 3.0]] * (k + 1),
            }
            for i in range(COUNT)
            for k in range(i)
        ],
        "categories": [{"id": k, "name": str(k)} for k in range(1, 9)],
    }
    text(root / "annotations.json", json.dumps(content))
    return tv.CocoDetection(str(root), str(root / "annotations.json"), transform=to_tensor)


def fer2013(root: Path) -> Any:
    rows = [{"emotion": i, "pixels": " ".join(["7"] * 48 * 48)} for i in range(COUNT)]
    folder = root / "fer2013"
    folder.mkdir(parents=True)
    with open(folder / "train.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["emotion", "pixels"])
        writer.writeheader()
        writer.writerows(rows)

    class Fer2013(tv.FER2013):
        _RESOURCES = {"train": ("train.csv", None), "fer": ("fer2013.csv", None), "icml": ("icml.csv", None)}  # noqa: RUF012

    return Fer2013(str(root), "train", transform=to_tensor)


def flying_chairs(root: Path) -> Any:
    data = root / "FlyingChairs" / "data"
    for i in range(1, COUNT + 1):
        for k in (1, 2):
            picture(data / f"{i:05}_img{k}.ppm", i * k)
        flow = np.full((5, 6, 2), i, "<f4")
        (data / f"{i:05}_flow.flo").write_bytes(b"PIEH" + struct.pack("<ii", 6, 5) + flow.tobytes())
    text(root / "FlyingChairs" / "FlyingChairs_train_val.txt", "1\n" * COUNT)
    return tv.FlyingChairs(str(root), transforms=pair_to_tensors)


def pair_to_tensors(first: Any, second: Any, flow: Any, *valid: Any) -> Any:
    return (to_tensor(first), to_tensor(second), flow, *valid)


def eurosat(root: Path) -> Any:
    for i in range(COUNT):
        picture(root / "eurosat" / "2750" / "ab"[i % 2] / f"{i}.jpg", i)
    return tv.EuroSAT(str(root), transform=to_tensor)


def dtd(root: Path) -> Any:
    data = root / "dtd" / "dtd"
    for i in range(COUNT):
        picture(data / "images" / "ab"[i % 2] / f"{i}.jpg", i)
    text(data / "labels" / "train1.txt", "".join(f"{'ab'[i % 2]}/{i}.jpg\n" for i in range(COUNT)))
    return tv.DTD(str(root), transform=to_tensor)


def food101(root: Path) -> Any:
    data = root / "food-101"
    for i in range(COUNT):
        picture(data / "images" / "ab"[i % 2] / f"{i}.jpg", i)
    members = {c: [f"{c}/{i}" for i in range(COUNT) if "ab"[i % 2] == c] for c in "ab"}
    text(data / "meta" / "train.json", json.dumps(members))
    return tv.Food101(str(root), transform=to_tensor)


def country211(root: Path) -> Any:
    for i in range(COUNT):
        picture(root / "country211" / "train" / "AB"[i % 2] / f"{i}.jpg", i)
    return tv.Country211(str(root), transform=to_tensor)


def sst2(root: Path) -> Any:
    for i in range(COUNT):
        picture(root / "rendered-sst2" / "train" / ["negative", "positive"][i % 2] / f"{i}.png", i)
    return tv.RenderedSST2(str(root), transform=to_tensor)


def pets(root: Path) -> Any:
    base = root / "oxford-iiit-pet"
    for i in range(COUNT):
        picture(base / "images" / f"a_cat_{i}.jpg", i)
        picture(base / "annotations" / "trimaps" / f"a_cat_{i}.png", i, mode="L")
    text(base / "annotations" / "trainval.txt", "".join(f"a_cat_{i} 1 1 1\n" for i in range(COUNT)))
    return tv.OxfordIIITPet(str(root), target_types=["category", "binary-category"], transform=to_tensor)


def gtsrb(root: Path) -> Any:
    for i in range(COUNT):
        picture(root / "gtsrb" / "GTSRB" / "Training" / f"{i % 2:05}" / f"{i}.ppm", i)
    return tv.GTSRB(str(root), transform=to_tensor)


def sun397(root: Path) -> Any:
    data = root / "SUN397"
    text(data / "ClassName.txt", "/a/abbey\n/b/beach\n")
    for i in range(COUNT):
        picture(data / ["a/abbey", "b/beach"][i % 2] / f"sun_{i}.jpg", i)
    return tv.SUN397(str(root), transform=to_tensor)


def aircraft(root: Path) -> Any:
    data = root / "fgvc-aircraft-2013b" / "data"
    text(data / "variants.txt", "a\nb\n")
    text(data / "images_variant_trainval.txt", "".join(f"{i} {'ab'[i % 2]}\n" for i in range(COUNT)))
    for i in range(COUNT):
        picture(data / "images" / f"{i}.jpg", i)
    return tv.FGVCAircraft(str(root), transform=to_tensor)


class Speech(Dataset[Any]):
    """Torchaudio's common shape: waveform, sample rate, text, and numbers that say whose."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> Any:
        return torch.full((1, 40), float(i)), 16_000, "so it goes" * i, 19, 198, i


def audio(root: Path) -> Any:
    return Speech()


def tensors(root: Path) -> Any:
    return TensorDataset(torch.arange(COUNT * 4.0).view(COUNT, 4), torch.arange(COUNT))


def nested(root: Path) -> Any:
    base = tensors(root)
    return ConcatDataset([Subset(base, [3, 1, 1]), Subset(ConcatDataset([base, base]), [9, 0])])


def stacked(root: Path) -> Any:
    return StackDataset(x=torch.arange(COUNT), y=tensors(root))


def hugging_face(kind: str | None) -> Callable[[Path], Any]:
    def build(root: Path) -> Any:
        hf = pytest.importorskip("datasets")
        columns = {
            "ids": [list(range(12 + i % 2)) for i in range(COUNT)],
            "text": ["é" * i for i in range(COUNT)],
            "score": [i / 3 for i in range(COUNT)],
        }
        if kind == "numpy":
            del columns["score"]  # float64 from ``__getitem__`` and float32 from ``__getitems__``, by the bare dataset
        return hf.Dataset.from_dict(columns).with_format(kind)

    return build


DATASETS: dict[str, Callable[[Path], Any]] = {
    "FakeData": fake,
    "ImageFolder": image_folder,
    "DatasetFolder": dataset_folder,
    "MNIST": mnist_like(tv.MNIST),
    "FashionMNIST": mnist_like(tv.FashionMNIST),
    "KMNIST": mnist_like(tv.KMNIST),
    "EMNIST": emnist,
    "QMNIST": qmnist,
    "MovingMNIST": moving_mnist,
    "CIFAR10": cifar(Cifar10, "labels"),
    "CIFAR100": cifar(Cifar100, "fine_labels"),
    "STL10": stl10,
    "VOCDetection": voc(tv.VOCDetection, "Annotations", "Main"),
    "VOCSegmentation": voc(tv.VOCSegmentation, "SegmentationClass", "Segmentation"),
    "Kitti": kitti,
    "CelebA": celeba,
    "CocoDetection": coco,
    "FER2013": fer2013,
    "FlyingChairs": flying_chairs,
    "EuroSAT": eurosat,
    "DTD": dtd,
    "Food101": food101,
    "Country211": country211,
    "RenderedSST2": sst2,
    "OxfordIIITPet": pets,
    "GTSRB": gtsrb,
    "SUN397": sun397,
    "FGVCAircraft": aircraft,
    "audio": audio,
    "TensorDataset": tensors,
    "nested": nested,
    "StackDataset": stacked,
    "Hugging Face": hugging_face(None),
    "Hugging Face, torch": hugging_face("torch"),
    "Hugging Face, numpy": hugging_face("numpy"),
}
WRAPPED = ("MNIST", "CIFAR10", "ImageFolder", "VOCDetection", "VOCSegmentation", "Kitti", "CelebA", "CocoDetection")


def batches(dataset: Any, collate: Any, num_workers: int = 0) -> Iterator[Any]:
    return iter(DataLoader(dataset, batch_size=2, collate_fn=collate, num_workers=num_workers))


def as_batches(items: list[Any], collate: Any) -> list[Any] | Exception:
    try:
        return [collate(items[i : i + 2]) for i in range(0, len(items), 2)]
    except (TypeError, RuntimeError) as error:
        return error


def check(bare: Any, folder: Path, workers: Sequence[int] = (0, 2)) -> None:
    items = [bare[i] for i in range(len(bare))]
    assert len(items) == COUNT
    for collate in (default_collate, list):
        expected = as_batches(items, collate)
        fails = isinstance(expected, Exception)
        # An error with workers is tests/test_dataset.py's; here it would take seconds to end them.
        for num_workers in (0,) if fails else workers:
            cached = CachedDataset(bare, cache_dir=folder, key=f"{collate.__name__}-{num_workers}")
            for state in ("cold", "half-filled", "warm"):
                if state == "half-filled":
                    if num_workers:
                        continue
                    cached = CachedDataset(bare, cache_dir=folder, key=f"half-{collate.__name__}")
                    assert_same(cached[1], items[1])
                if fails:
                    with pytest.raises(type(expected)):
                        list(batches(cached, collate, num_workers))
                else:
                    assert_same(list(batches(cached, collate, num_workers)), expected)
                cached.fill(progress=False)
            assert_same([cached[i] for i in range(COUNT)], items)
            # Where there are two ways to read a sample, each process may read one of them both ways.
            twice = 0 if batched_read(bare) is None else max(num_workers, 1)
            assert COUNT <= cached.stats.source_reads <= COUNT + twice
            cached.close()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("build", DATASETS.values(), ids=DATASETS)
def test_bare_equals_wrapped(build: Any, tmp_path: Path) -> None:
    check(build(tmp_path / "data"), tmp_path / "cache")


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_for_transforms_v2(name: str, tmp_path: Path) -> None:
    wrapped = tv.wrap_dataset_for_transforms_v2(DATASETS[name](tmp_path / "data"))
    check(wrapped, tmp_path / "cache")
