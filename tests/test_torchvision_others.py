"""More of torchvision's datasets, and the table of all of them: what is fed, and what is left out and why."""

from __future__ import annotations

import bz2
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_torchvision_datasets import COUNT, DATASETS, LABELS, check, images, picture, text, to_tensor
from torchvision import datasets as tv


def unchecked(cls: Any) -> Any:
    """The dataset, whose files need not be the published ones."""
    return type(cls.__name__, (cls,), {"_check_integrity": lambda self, *arguments: True})


def mat(path: Path, **content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("scipy.io").savemat(path, content)


def floats(path: Path, i: int) -> None:
    """A disparity map in the PFM format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"Pf\n6 5\n-1.0\n" + np.full((5, 6), i + 0.5, "<f4").tobytes())


def deep(path: Path, i: int) -> None:
    """A picture of 16 bits a pixel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((5, 6), 300 * i + 1, np.uint16)).save(path)


def svhn(root: Path) -> Any:
    mat(root / "train_32x32.mat", X=images(32, 32, 3).transpose(1, 2, 3, 0), y=LABELS[:, None] + 9)
    return unchecked(tv.SVHN)(str(root), transform=to_tensor)


def usps(root: Path) -> Any:
    root.mkdir()
    lines = [f"{i + 1} " + " ".join(f"{k + 1}:{(i + k) % 3 - 1}" for k in range(256)) + " \n" for i in range(COUNT)]
    (root / "usps.bz2").write_bytes(bz2.compress("".join(lines).encode()))
    return tv.USPS(str(root), transform=to_tensor)


def semeion(root: Path) -> Any:
    bits = "".join(
        " ".join(["0", "1"] * 128) + " " + " ".join(str(int(k == i)) for k in range(10)) + "\n" for i in range(COUNT)
    )
    text(root / "semeion.data", bits)
    return unchecked(tv.SEMEION)(str(root), transform=to_tensor, download=False)


def places365(root: Path) -> Any:
    text(root / "categories_places365.txt", "/a/abbey 0\n/b/beach 1\n")
    text(root / "places365_train_standard.txt", "".join(f"/{'ab'[i % 2]}/{i}.jpg {i % 2}\n" for i in range(COUNT)))
    for i in range(COUNT):
        picture(root / "data_256_standard" / "ab"[i % 2] / f"{i}.jpg", i)
    return unchecked(tv.Places365)(str(root), small=True, transform=to_tensor)


def cityscapes(root: Path) -> Any:
    for i in range(COUNT):
        picture(root / "leftImg8bit" / "train" / "ulm" / f"ulm_{i}_leftImg8bit.png", i)
        for kind in ("instanceIds", "labelIds", "color"):
            picture(root / "gtFine" / "train" / "ulm" / f"ulm_{i}_gtFine_{kind}.png", i, mode="L")
        polygons = {"imgHeight": 5, "objects": [{"label": "car", "polygon": [[0, 1], [2, i]]}] * (i % 3)}
        text(root / "gtFine" / "train" / "ulm" / f"ulm_{i}_gtFine_polygons.json", json.dumps(polygons))
    return tv.Cityscapes(str(root), target_type=KINDS, transform=to_tensor, target_transform=lambda x: tensors(*x))


KINDS = ["instance", "semantic", "polygon", "color"]


def omniglot(root: Path) -> Any:
    for i in range(COUNT):
        picture(root / "omniglot-py" / "images_background" / "Greek" / f"character{i % 2}" / f"{i}.png", i, mode="1")
    return unchecked(tv.Omniglot)(str(root), transform=to_tensor)


def caltech101(root: Path) -> Any:
    base = root / "caltech101"
    (base / "101_ObjectCategories" / "BACKGROUND_Google").mkdir(parents=True)
    for i in range(COUNT):
        picture(base / "101_ObjectCategories" / "Faces" / f"image_{i + 1:04}.jpg", i)
        mat(base / "Annotations" / "Faces_2" / f"annotation_{i + 1:04}.mat", obj_contour=np.full((2, 3 + i), i + 0.5))
    return tv.Caltech101(str(root), ["category", "annotation"], transform=to_tensor)


def caltech256(root: Path) -> Any:
    for i in range(COUNT):
        picture(root / "caltech256" / "256_ObjectCategories" / "001.bear" / f"001_{i + 1:04}.jpg", i)
    return tv.Caltech256(str(root), transform=to_tensor)


def flowers102(root: Path) -> Any:
    base = root / "flowers-102"
    for i in range(COUNT):
        picture(base / "jpg" / f"image_{i + 1:05}.jpg", i)
    mat(base / "setid.mat", trnid=np.arange(1, COUNT + 1))
    mat(base / "imagelabels.mat", labels=LABELS + 1)
    return unchecked(tv.Flowers102)(str(root), transform=to_tensor)


def sbd(root: Path) -> Any:
    text(root / "train.txt", "".join(f"{i}\n" for i in range(COUNT)))
    kind = [("Segmentation", "O"), ("Boundaries", "O")]
    for i in range(COUNT):
        picture(root / "img" / f"{i}.jpg", i)
        truth = np.zeros((1, 1), kind)
        truth["Segmentation"][0, 0] = np.full((5, 6), i, np.uint8)
        mat(root / "cls" / f"{i}.mat", GTcls=truth)
    return tv.SBDataset(
        str(root), mode="segmentation", transforms=lambda image, mask: (to_tensor(image), to_tensor(mask))
    )


def flickr8k(root: Path) -> Any:
    rows = ""
    for i in range(COUNT):
        picture(root / f"{i}_x.jpg", i)
        rows += f"<a>http://host/{i}/</a>" + "<ul>" + f"<li>caption {i}</li>" * (1 + i % 3) + "</ul>"
    text(root / "captions.html", f"<table>{rows}</table>")
    return tv.Flickr8k(str(root), str(root / "captions.html"), transform=to_tensor)


def flickr30k(root: Path) -> Any:
    for i in range(COUNT):
        picture(root / f"{i}.jpg", i)
    text(root / "captions", "".join(f"{i}.jpg#{k}\tcaption {k}\n" for i in range(COUNT) for k in range(1 + i % 3)))
    return tv.Flickr30k(str(root), str(root / "captions"), transform=to_tensor)


def lfw(cls: Any, labels: str, content: str) -> Callable[[Path], Any]:
    def build(root: Path) -> Any:
        base = root / "lfw-py"
        for i in range(1, COUNT + 1):
            for name in ("Ada", "Bob"):
                picture(base / "lfw_funneled" / name / f"{name}_{i:04}.jpg", i)
        text(base / "lfw-names.txt", f"Ada\t{COUNT}\nBob\t{COUNT}\n")
        text(base / labels, content)
        return unchecked(cls)(str(root), "train", transform=to_tensor)

    return build


def clevr(root: Path) -> Any:
    base = root / "clevr" / "CLEVR_v1.0"
    for i in range(COUNT):
        picture(base / "images" / "train" / f"{i}.png", i)
    scenes = [{"image_filename": f"{i}.png", "objects": [0] * i} for i in range(COUNT)]
    text(base / "scenes" / "CLEVR_train_scenes.json", json.dumps({"scenes": scenes}))
    return tv.CLEVRClassification(str(root), transform=to_tensor)


def imagenette(root: Path) -> Any:
    for i in range(COUNT):
        picture(root / "imagenette2" / "train" / ["n01440764", "n02102040"][i % 2] / f"{i}.jpeg", i)
    return tv.Imagenette(str(root), transform=to_tensor)


def imagenet(root: Path) -> Any:
    for i in range(COUNT):
        picture(root / "train" / ["n01440764", "n02102040"][i % 2] / f"{i}.jpeg", i)
    names = {"n01440764": ("tench", "Tinca tinca"), "n02102040": ("English springer",)}
    torch.save((names, ["n01440764"]), root / "meta.bin")
    return tv.ImageNet(str(root), transform=to_tensor)


def inaturalist(root: Path) -> Any:
    for i in range(COUNT):
        picture(root / "2021_train" / f"{i % 2:05}_a_b_c_d_e_f_{i % 2}" / f"{i}.jpg", i)
    return tv.INaturalist(str(root), target_type=["full", "order"], transform=to_tensor)


def photo_tour(root: Path) -> Any:
    root.mkdir()
    matches = torch.tensor([[i, (i + 1) % COUNT, i % 2] for i in range(COUNT)])
    torch.save((torch.from_numpy(images(64, 64)), torch.arange(COUNT), matches), root / "notredame.pt")
    return tv.PhotoTour(str(root), "notredame", train=False)


def tensors(*parts: Any) -> Any:
    """Whatever is a picture among the parts, and parts of parts, as a tensor."""
    return tuple(
        [
            to_tensor(part) if isinstance(part, Image.Image) else tensors(*part) if isinstance(part, tuple) else part
            for part in parts
        ]
    )


def stereo(cls: Any, left: str, right: str, disparity: str, write: Any, **kwargs: Any) -> Callable[[Path], Any]:
    def build(root: Path) -> Any:
        for i in range(COUNT):
            for pattern in (left, right):
                picture(root / pattern.format(i), i)
            for side in (0, 1):
                write(root / disparity.format(i, side), i + side)
        return cls(str(root), transforms=tensors, **kwargs)

    return build


def sintel(root: Path) -> Any:
    base = root / "Sintel" / "training"
    for i in range(COUNT + 1):
        picture(base / "clean" / "alley" / f"{i}.png", i)
        (base / "flow" / "alley").mkdir(parents=True, exist_ok=True)
    for i in range(COUNT):
        flow = b"PIEH" + struct.pack("<ii", 6, 5) + np.full((5, 6, 2), i, "<f4").tobytes()
        (base / "flow" / "alley" / f"{i}.flo").write_bytes(flow)
    return tv.Sintel(str(root), pass_name="clean", transforms=tensors)


FED: dict[str, Callable[[Path], Any]] = {
    "SVHN": svhn,
    "USPS": usps,
    "SEMEION": semeion,
    "Places365": places365,
    "Cityscapes": cityscapes,
    "Omniglot": omniglot,
    "Caltech101": caltech101,
    "Caltech256": caltech256,
    "Flowers102": flowers102,
    "SBDataset": sbd,
    "Flickr8k": flickr8k,
    "Flickr30k": flickr30k,
    "LFWPeople": lfw(tv.LFWPeople, "peopleDevTrain.txt", f"1\nAda\t{COUNT}\n"),
    "LFWPairs": lfw(tv.LFWPairs, "pairsDevTrain.txt", "3\n" + "Ada\t1\t2\n" * 3 + "Ada\t1\tBob\t3\n" * (COUNT - 3)),
    "CLEVRClassification": clevr,
    "Imagenette": imagenette,
    "ImageNet": imagenet,
    "INaturalist": inaturalist,
    "PhotoTour": photo_tour,
    "Sintel": sintel,
    "CarlaStereo": stereo(
        tv.CarlaStereo,
        "carla-highres/trainingF/{}/im0.png",
        "carla-highres/trainingF/{}/im1.png",
        "carla-highres/trainingF/{}/disp{}GT.pfm",
        floats,
    ),
    "Kitti2015Stereo": stereo(
        tv.Kitti2015Stereo,
        "Kitti2015/training/image_2/{}.png",
        "Kitti2015/training/image_3/{}.png",
        "Kitti2015/training/disp_occ_{1}/{0}.png",
        deep,
    ),
}
FILM = "needs a decoder of films"
STEREO = "is read by the code of CarlaStereo and Kitti2015Stereo, from another layout of folders"
FLOW = "is read by the code of Sintel and FlyingChairs, from another layout of folders"
LEFT_OUT = {
    "Kinetics": FILM,
    "HMDB51": FILM,
    "UCF101": FILM,
    "LSUN": "reads an LMDB of pictures, which open in this process must not be opened again",
    "LSUNClass": "is a part of LSUN",
    "CocoCaptions": "is CocoDetection with another target",
    "PCAM": "needs h5py",
    "SBU": "is a list of links with captions, of which it holds as many files",
    "StanfordCars": "is as Flowers102: a list in a .mat file",
    "WIDERFace": "is as CelebA: lists of boxes",
    "VisionDataset": "is the base class",
    "KittiFlow": FLOW,
    "FlyingThings3D": FLOW,
    "HD1K": FLOW,
    **dict.fromkeys(
        ["Kitti2012Stereo", "Middlebury2014Stereo", "CREStereo", "FallingThingsStereo", "SceneFlowStereo",
         "SintelStereo", "InStereo2k", "ETH3DStereo"],
        STEREO,
    ),
}  # fmt: skip


@pytest.mark.parametrize("build", FED.values(), ids=FED)
def test_bare_equals_wrapped(build: Any, tmp_path: Path) -> None:
    check(build(tmp_path / "data"), tmp_path / "cache", workers=(0,))


def test_every_dataset_is_fed_or_left_out_for_a_reason() -> None:
    every = {name for name in tv.__all__ if isinstance(getattr(tv, name), type)}
    fed = (DATASETS.keys() | FED.keys()) & every
    assert not fed & LEFT_OUT.keys()
    assert fed | LEFT_OUT.keys() == every, "feed it, or say why not"
