"""A dataset straight from an object store, one GET a sample: through the cache each object is fetched once.

python examples/object_store.py [--samples 512] [--epochs 10] [--workers 4] [--jobs 2]
python examples/object_store.py --url s3://bucket/prefix [--endpoint-url https://obs.example.com]

Several jobs train on the objects at the same time, each with several workers and for several epochs. Without --url
a store is started on this machine (moto's S3 server, from the extra "test"), filled, and its requests are counted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import torch
from torch.utils.data import DataLoader, Dataset

from torchcache import CachedDataset


class Objects(Dataset[Any]):
    """The objects below a prefix, each a sample: its bytes as a uint8 tensor, and its key.

    Args:
        url: ``s3://bucket/prefix``.
        storage_options: for fsspec.
    """

    def __init__(self, url: str, storage_options: dict[str, Any]) -> None:
        self.url, self.storage_options = url, storage_options
        self._filesystem, self._process = None, -1
        listing = self.filesystem().find(url, detail=True)
        self.objects = [(key, info["size"], info["ETag"]) for key, info in sorted(listing.items())]

    def filesystem(self) -> Any:
        """The file system of this process: connections do not survive a fork, nor may two processes share them."""
        if self._process != os.getpid():
            self._filesystem = fsspec.filesystem("s3", **self.storage_options, skip_instance_cache=True)
            self._process = os.getpid()
        return self._filesystem

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_filesystem": None, "_process": -1}

    def __fingerprint__(self) -> Any:
        return self.url, self.objects  # with the ETags: other objects, another store

    def __len__(self) -> int:
        return len(self.objects)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        key, size, _ = self.objects[index]
        # With its limits, or s3fs asks for the size in a request of its own.
        data = self.filesystem().cat_file(key, start=0, end=size)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8), key


def job(arguments: argparse.Namespace) -> None:
    """What one training job does."""
    source = Objects(arguments.url, arguments.storage_options)
    # check=0: otherwise a job that finds the store filled compares one sample with the source, one GET more.
    train = CachedDataset(source, cache_dir=arguments.cache_dir, check=0)
    loader = DataLoader(
        train, batch_size=32, shuffle=True, num_workers=arguments.workers, persistent_workers=arguments.workers > 0
    )
    bytes_read = [sum(images.numel() for images, _ in loader) for _ in range(arguments.epochs)]
    alike, reads = len(set(bytes_read)) == 1, train.stats.source_reads
    print(
        f"job: {arguments.epochs} epochs of {bytes_read[0]:,} bytes, all alike: {alike}; {reads:,} source reads in all"
    )


@contextmanager
def own_store(samples: int) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """A store on this machine: its URL, fsspec's options for it, and the objects that were asked for."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would print each request
    application, gets = DomainDispatcherApplication(create_backend_app), []

    def counted(environ: dict[str, Any], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].startswith("/bucket/train/"):
            gets.append(environ["PATH_INFO"])
        return application(environ, start_response)

    server = make_server("127.0.0.1", 0, counted, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    options = {"endpoint_url": f"http://127.0.0.1:{server.port}", "key": "any", "secret": "any"}
    try:
        store = fsspec.filesystem("s3", **options)
        store.mkdir("bucket")
        store.pipe({f"bucket/train/{i:06}.bin": random.Random(i).randbytes(3072) for i in range(samples)})
        yield "s3://bucket/train", options, gets
    finally:
        server.shutdown()
        thread.join()


def run_jobs(count: int, options: dict[str, Any]) -> None:
    """Runs the jobs at the same time."""
    command = [sys.executable, __file__, "--job", json.dumps(options)]
    jobs = [subprocess.Popen(command) for _ in range(count)]
    statuses = [process.wait() for process in jobs]
    if any(statuses):
        sys.exit("a job failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of objects that are there; default: a store of its own")
    parser.add_argument("--endpoint-url", help="of the store, where it is not AWS; credentials as boto3 finds them")
    parser.add_argument("--samples", type=int, default=512, help="in a store of its own")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=4, help="of each job")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--job", help=argparse.SUPPRESS)  # this process is one of the jobs
    arguments = parser.parse_args()
    if arguments.job:
        job(argparse.Namespace(**json.loads(arguments.job)))
        return
    options = {"epochs": arguments.epochs, "workers": arguments.workers}
    if arguments.url:
        store = {"endpoint_url": arguments.endpoint_url} if arguments.endpoint_url else {}
        run_jobs(arguments.jobs, {**options, "url": arguments.url, "storage_options": store, "cache_dir": None})
        return
    print("no --url: an S3 server is started on this machine, with a cache folder that is removed afterwards")
    with own_store(arguments.samples) as (url, store, gets), tempfile.TemporaryDirectory() as cache_dir:
        run_jobs(arguments.jobs, {**options, "url": url, "storage_options": store, "cache_dir": cache_dir})
    drawn = arguments.jobs * arguments.epochs * arguments.samples
    print(f"samples drawn: {drawn:,}; GETs at the server: {len(gets):,}; samples: {arguments.samples:,}")
    if len(gets) != arguments.samples or len(set(gets)) != arguments.samples:
        sys.exit("the GETs are not one for each sample")


if __name__ == "__main__":
    main()
