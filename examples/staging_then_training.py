"""Files are copied from an object store to this node's disk, then decoded once: training reads neither again.

python examples/staging_then_training.py [--samples 256]
python examples/staging_then_training.py --url s3://bucket/train [--endpoint-url https://obs.example.com]

Without --url the files are a folder of generated images, which stands for the bucket.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import v2

from torchcache import CachedDataset, stage


def make_bucket(folder: Path, samples: int) -> str:
    """A folder a class, with an image file a sample."""
    for number, (image, label) in enumerate(FakeData(samples, image_size=(3, 64, 64), num_classes=2)):
        (folder / f"class-{label}").mkdir(exist_ok=True)
        image.save(folder / f"class-{label}" / f"{number}.png")
    return str(folder)


def main() -> None:
    """Stages, trains two epochs, and stages again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a folder a class, with image files")
    parser.add_argument("--endpoint-url", help="the address of OBS, MinIO, Ceph, …")
    parser.add_argument("--samples", type=int, default=256, help="without --url")
    parser.add_argument("--cache-dir", help="default: $CACHE_DIR, or with generated images a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        url, cache_dir = args.url, args.cache_dir
        if url is None:
            (bucket := Path(scratch) / "bucket").mkdir()
            url, cache_dir = make_bucket(bucket, args.samples), cache_dir or f"{scratch}/cache"
        options = {} if args.endpoint_url is None else {"endpoint_url": args.endpoint_url}
        root = stage(url, cache_dir, storage_options=options)

        to_tensor = v2.Compose([v2.ToImage(), v2.ToPureTensor(), v2.Resize((64, 64), antialias=True)])
        train = CachedDataset(ImageFolder(str(root), transform=to_tensor), cache_dir=cache_dir, check=0)
        for epoch in range(2):
            seen = sum(len(labels) for _, labels in DataLoader(train, batch_size=32, shuffle=True))
            print(f"epoch {epoch}: {seen} samples, {train.stats.source_reads} files decoded so far")
        train.close()

        again = stage(url, cache_dir, storage_options=options)  # as the next job would: lists, and copies nothing
        print(f"staged again: the same folder: {again == root}; files: {sum(p.is_file() for p in root.rglob('*'))}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
