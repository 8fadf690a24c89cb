"""How other libraries keep a data set of (tensor, int): each converts a source, and gives an epoch of its batches.

Each function takes the source and an empty folder, converts the one into the other, and returns a function from batch
size and number of workers to a loader of shuffled batches, made as the library's own documentation does. A library
that is not installed raises ``ImportError``.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch
from common import length
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchcache
from torchcache import CachedDataset

Loaders = Callable[[int, int], Iterable[Any]]
Convert = Callable[[Dataset[Any], Path], Loaders]
MAP_BYTES = 1 << 40
SHUFFLE_BUFFER = 1000  # samples, of those that read in order
CHUNK_BYTES = 1 << 26


def stock(dataset: Any, cls: Any = DataLoader, **more: Any) -> Loaders:
    """A loader of PyTorch's over a map-style dataset."""
    return lambda batch_size, workers: cls(dataset, batch_size=batch_size, shuffle=True, num_workers=workers, **more)


def as_list(batch: Any) -> Any:
    """A collate function for what is a batch already."""
    return batch


def sample(source: Any, index: int) -> Any:
    """One sample; a function that can be pickled by ``functools.partial``."""
    return source[index]


def arrays(source: Dataset[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples in two tensors."""
    images, labels = zip(*DataLoader(source, batch_size=500), strict=True)
    return torch.cat(images), torch.cat(labels)


def _filled(source: Dataset[Any], folder: Path) -> CachedDataset:
    with CachedDataset(source, cache_dir=folder, key="peers") as dataset:
        dataset.fill()
    return CachedDataset(source, cache_dir=folder, key="peers", check=0)


def with_torchcache(source: Dataset[Any], folder: Path) -> Loaders:
    return stock(_filled(source, folder))


def with_own_loader(source: Dataset[Any], folder: Path) -> Loaders:
    return stock(_filled(source, folder), torchcache.DataLoader)


def uncached(source: Dataset[Any], folder: Path) -> Loaders:
    return stock(source)


def in_ram(source: Dataset[Any], folder: Path) -> Loaders:
    return stock(TensorDataset(*arrays(source)))


class Memmap(Dataset[Any]):
    """Two arrays on disk."""

    def __init__(self, folder: Path) -> None:
        self.images, self.labels = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "labels"))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.images[index].copy()), int(self.labels[index])


def numpy_memmap(source: Dataset[Any], folder: Path) -> Loaders:
    for name, array in zip(("images", "labels"), arrays(source), strict=True):
        np.save(folder / f"{name}.npy", array.numpy())
    return stock(Memmap(folder))


class Pickles(Dataset[Any]):
    """The usual recipe: LMDB, one pickle a sample. Opened by who reads."""

    def __init__(self, folder: Path, samples: int) -> None:
        self.folder, self.samples, self.env = str(folder), samples, None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "env": None}

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if self.env is None:
            self.env = lmdb.open(self.folder, readonly=True, lock=False, readahead=False, meminit=False)
        with self.env.begin(buffers=True) as txn:
            return pickle.loads(txn.get(index.to_bytes(8, "big")))


def lmdb_pickles(source: Any, folder: Path) -> Loaders:
    with lmdb.open(str(folder), map_size=MAP_BYTES, writemap=True) as env, env.begin(write=True) as txn:
        for index in range(length(source)):
            image, label = source[index]
            txn.put(index.to_bytes(8, "big"), pickle.dumps((image.numpy(), label), protocol=5), append=True)
    return stock(Pickles(folder, length(source)))


def hugging_face(source: Any, folder: Path) -> Loaders:
    import datasets

    first = source[0][0].numpy()
    kind = {1: datasets.Array2D, 3: datasets.Array3D}[1 if first.ndim == 2 else 3]
    features = datasets.Features({"image": kind(first.shape, str(first.dtype)), "label": datasets.Value("int64")})

    def rows() -> Iterable[dict[str, Any]]:
        for index in range(length(source)):
            image, label = source[index]
            yield {"image": image.numpy(), "label": int(label)}

    made = datasets.Dataset.from_generator(rows, features=features, cache_dir=str(folder), fingerprint="peers")
    return stock(made.with_format("torch"))


def tensordict_memmap(source: Dataset[Any], folder: Path) -> Loaders:
    from tensordict import TensorDict

    images, labels = arrays(source)
    TensorDict({"image": images, "label": labels}, batch_size=[len(labels)]).memmap(str(folder))
    return stock(TensorDict.load_memmap(str(folder)), collate_fn=as_list)


def webdataset(source: Any, folder: Path) -> Loaders:
    import webdataset as wds

    with wds.ShardWriter(str(folder / "%06d.tar"), maxsize=CHUNK_BYTES, verbose=0) as writer:
        for index in range(length(source)):
            image, label = source[index]
            writer.write({"__key__": f"{index:08d}", "image.npy": image.numpy(), "label.cls": int(label)})
    shards = sorted(map(str, folder.glob("*.tar")))

    def loader(batch_size: int, workers: int) -> Iterable[Any]:
        data = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False).shuffle(SHUFFLE_BUFFER)
        batches = data.decode().to_tuple("image.npy", "label.cls").batched(batch_size)
        return wds.WebLoader(batches, batch_size=None, num_workers=workers)

    return loader


def litdata(source: Any, folder: Path) -> Loaders:
    import litdata as lit

    lit.optimize(
        fn=functools.partial(sample, source),
        inputs=list(range(length(source))),
        output_dir=str(folder),
        chunk_bytes=CHUNK_BYTES,
        num_workers=1,
        verbose=False,
    )
    return lambda batch_size, workers: lit.StreamingDataLoader(
        lit.StreamingDataset(str(folder), shuffle=True), batch_size=batch_size, num_workers=workers
    )


def mosaic_streaming(source: Any, folder: Path) -> Loaders:
    from streaming import MDSWriter, StreamingDataset

    first = source[0][0].numpy()
    columns = {"image": f"ndarray:{first.dtype}:{','.join(map(str, first.shape))}", "label": "int"}
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for index in range(length(source)):
            image, label = source[index]
            writer.write({"image": image.numpy(), "label": int(label)})
    return lambda batch_size, workers: DataLoader(
        StreamingDataset(local=str(folder), shuffle=True, batch_size=batch_size),
        batch_size=batch_size,
        num_workers=workers,
    )


class Load:
    """A deterministic transform from an index to the sample, which MONAI's caches run once."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __call__(self, index: int) -> Any:
        return self.source[index]


def _monai(name: str, source: Any, folder: Path, **options: Any) -> Loaders:
    import monai.data

    indices = list(range(length(source)))
    made = getattr(monai.data, name)(indices, Load(source), **options)
    for index in indices:
        made[index]
    return stock(made)


def monai_ram(source: Any, folder: Path) -> Loaders:
    return _monai("CacheDataset", source, folder, progress=False, num_workers=1)


def monai_files(source: Any, folder: Path) -> Loaders:
    return _monai("PersistentDataset", source, folder, cache_dir=str(folder))


def monai_lmdb(source: Any, folder: Path) -> Loaders:
    return _monai("LMDBDataset", source, folder, cache_dir=str(folder), progress=False)


class InSharedMemory(Dataset[Any]):
    """stocaching: images in shared memory; labels in a list, of which its documentation says nothing."""

    def __init__(self, source: Any) -> None:
        from stocaching import SharedCache

        images, labels = arrays(source)
        gib = 1.1 * images.nbytes / (1 << 30) + 0.01
        self.cache = SharedCache(gib, len(images), tuple(images.shape[1:]), dtype=images.dtype)
        for index, image in enumerate(images):
            self.cache.set_slot(index, image)
        self.labels = labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.cache.get_slot(index), self.labels[index]


def stocaching(source: Any, folder: Path) -> Loaders:
    return stock(InSharedMemory(source))


class OnDisk(Dataset[Any]):
    """diskcache: a key a sample."""

    def __init__(self, source: Any, folder: Path) -> None:
        import diskcache

        self.samples = length(source)
        self.cache = diskcache.Cache(str(folder), size_limit=MAP_BYTES, eviction_policy="none")
        with self.cache.transact():
            for index in range(self.samples):
                self.cache[index] = source[index]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.cache[index]


def diskcache(source: Any, folder: Path) -> Loaders:
    return stock(OnDisk(source, folder))


class AsArrays(Dataset[Any]):
    """Samples of NumPy arrays, as FFCV's fields take them."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return length(self.source)

    def __getitem__(self, index: int) -> Any:
        image, label = self.source[index]
        return image.numpy(), int(label)


def ffcv(source: Any, folder: Path) -> Loaders:
    from ffcv.fields import IntField, NDArrayField
    from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToTensor
    from ffcv.writer import DatasetWriter

    first, path = source[0][0].numpy(), str(folder / "data.beton")
    fields = {"image": NDArrayField(first.dtype, first.shape), "label": IntField()}
    DatasetWriter(path, fields, num_workers=1).from_indexed_dataset(AsArrays(source))
    steps = {"image": [NDArrayDecoder(), ToTensor()], "label": [IntDecoder(), ToTensor(), Squeeze()]}

    @functools.cache  # it compiles itself when it is made, and gives as many epochs as one likes
    def loader(batch_size: int, workers: int) -> Any:
        return Loader(
            path, batch_size=batch_size, num_workers=max(1, workers), order=OrderOption.RANDOM, pipelines=steps
        )

    return loader


PEERS: dict[str, Convert] = {
    "torchcache": with_torchcache,
    "torchcache, own loader": with_own_loader,
    "uncached": uncached,
    "TensorDataset in RAM": in_ram,
    "LMDB, a pickle a sample": lmdb_pickles,
    "numpy.memmap": numpy_memmap,
    "LitData": litdata,
    "MosaicML Streaming": mosaic_streaming,
    "Hugging Face datasets": hugging_face,
    "WebDataset": webdataset,
    "tensordict, memory-mapped": tensordict_memmap,
    "MONAI CacheDataset": monai_ram,
    "MONAI PersistentDataset": monai_files,
    "MONAI LMDBDataset": monai_lmdb,
    "stocaching": stocaching,
    "diskcache": diskcache,
    "FFCV": ffcv,
}
