"""What is in a store: a description of it, the verification of all of it, and its comparison with the source."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchcache import block as blocks
from torchcache import provenance, records
from torchcache.block import HEAD_BYTES
from torchcache.check import check_samples
from torchcache.column import Column
from torchcache.environment import DATA_FILE
from torchcache.errors import CorruptStoreError, StoreError, StoreUnavailableError, UnsupportedSampleError
from torchcache.guard import RandomnessGuard
from torchcache.reader import Reader
from torchcache.records import Seal, Survey
from torchcache.schema import leaf_names
from torchcache.source import Source
from torchcache.store import Store


@dataclass(frozen=True)
class ColumnInfo:
    """One leaf of every sample of a schema.

    Attributes:
        name: where it is in the sample, as in ``['image']`` or ``[0]``.
        kind: what it is: ``tensor``, ``ndarray``, ``int``, ``str``, …
        dtype: of its elements; empty for text and bytes.
        shape: of every sample; ``None`` where it differs.
        nbytes: of all its values, in bytes.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int


@dataclass(frozen=True)
class SchemaInfo:
    """The structure that some samples share: how many, and their columns."""

    samples: int
    columns: list[ColumnInfo]


@dataclass(frozen=True)
class Description:
    """What a store says of itself.

    Attributes:
        format_version: of the format.
        allow_pickle: whether its samples may hold pickled objects.
        sealed: whether it is complete and has its index.
        blocks: how many blocks it has.
        block_bytes: their size in bytes.
        duplicate_reads: samples that were read more than once, because an owner stalled.
        claimed: samples that somebody is reading just now.
        schemas: the structures of its samples.
        parts: what went into its key, by attribute path; empty if the user gave it, ``None`` if that is not known.
    """

    format_version: int
    allow_pickle: bool
    sealed: bool
    blocks: int
    block_bytes: int
    duplicate_reads: int
    claimed: int
    schemas: list[SchemaInfo]
    parts: dict[str, str] | None


def describe(path: Path) -> Description:
    """What a store says of itself; reads its log, and of its blocks what the lengths of their values are.

    Raises:
        StoreError: if there is no store, or one that cannot be read.
    """
    with _readable(path), Store.look(path) as opened:
        survey = opened.survey()
        sizes = _column_bytes(opened, survey)
        schemas = [
            SchemaInfo(
                samples=sum(entry.head.count for entry in survey.entries if entry.head.schema_id == number),
                columns=[
                    ColumnInfo(name, column.kind, _dtype_name(column), column.shape, nbytes)
                    for name, column, nbytes in zip(leaf_names(text), schema.columns, sizes[number], strict=True)
                ],
            )
            for number, (text, schema) in enumerate(zip(survey.schemas, opened.schemas, strict=True))
        ]
        return Description(
            format_version=records.FORMAT_VERSION,
            allow_pickle=opened.identity.allow_pickle,
            sealed=opened.seal is not None,
            blocks=len(survey.entries),
            block_bytes=survey.counters.nbytes,
            duplicate_reads=survey.counters.duplicate_reads,
            claimed=survey.claimed,
            schemas=schemas,
            parts=(provenance.from_record(survey.parts) or {}) if survey.parts else None,
        )


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what reading a store runs into, which may hold anything, into our errors."""
    try:
        yield
    except StoreError:
        raise
    except UnsupportedSampleError as error:  # of another PyTorch
        raise StoreUnavailableError(f"{path}: {error}") from error
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError, RecursionError) as error:
        raise CorruptStoreError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


def _dtype_name(column: Column) -> str:
    return "" if column.is_raw else str(column.torch_dtype or column.numpy_dtype).removeprefix("torch.")


def _column_bytes(opened: Store, survey: Survey) -> list[list[int]]:
    """Of each schema, the bytes of each column's values."""
    sizes = [[0] * len(schema.columns) for schema in opened.schemas]
    if not survey.entries:
        return sizes
    with open(opened.data_path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for entry in survey.entries:
            count, columns = entry.head.count, opened.schemas[entry.head.schema_id].columns
            starts, _ = blocks.column_starts(columns, count)
            for c, (start, column) in enumerate(zip(starts, columns, strict=True)):
                if column.shape is not None:
                    sizes[entry.head.schema_id][c] += count * column.stride
                    continue
                width, first = 1 + column.ndim, entry.offset + start
                records = np.frombuffer(data[first : first + 8 * width * count], "<i8").reshape(count, width)
                sizes[entry.head.schema_id][c] += int(records[:, 1:].prod(axis=1).sum()) * column.itemsize
    return sizes


@dataclass(frozen=True)
class VerifyReport:
    """What has been verified.

    Attributes:
        path: the store's folder.
        samples: how many it holds.
        length: how many the dataset has.
        blocks: how many blocks were read.
        nbytes: their size in bytes.
        sealed: whether there is an index, which agrees with the log then.
        seconds: how long it took.
    """

    path: Path
    samples: int
    length: int
    blocks: int
    nbytes: int
    sealed: bool
    seconds: float


def verify(path: Path, progress: Callable[[int, int], object] = lambda nbytes, total: None) -> VerifyReport:
    """Reads a whole store and checks everything that it says: it may be in use, and be filled meanwhile.

    Every block: its place, its schema, its checksum, and that every value lies inside it. Every sample is there once at
    most, and is one that the dataset has. The totals are those of the blocks. The index of a sealed store is that of
    its log.

    Args:
        path: the store's folder.
        progress: told of each block its bytes, and those of all blocks.

    Raises:
        CorruptStoreError: for the first thing that is wrong.
        StoreError: if there is no store, or one that cannot be read.
    """
    began = time.monotonic()
    with _readable(path):
        with Store.look(path) as opened:
            survey = opened.survey()
            identity, schemas, seal = opened.identity, opened.schemas, opened.seal
        _check_log(path, survey, identity.length)
        if seal is not None and survey.counters.samples != identity.length:
            raise CorruptStoreError(f"{path} is sealed with {survey.counters.samples} of {identity.length} samples")
        # Not as many places as an incomplete store says that there will be samples: that may be any number.
        reader = Reader(path / DATA_FILE, 0 if seal is None else identity.length, schemas, marks=False)
        for entry in survey.entries:
            if entry.head.schema_id >= len(schemas):
                raise CorruptStoreError(f"{path}: block {entry.sequence} has an unknown schema")
            blocks.check(reader.bytes_at(entry.offset, entry.head.nbytes), schemas[entry.head.schema_id], checksum=True)
            progress(entry.head.nbytes, survey.counters.nbytes)
        if seal is not None:
            reader.apply(survey.entries)
            _check_index(path, reader, seal)
    return VerifyReport(
        path=path,
        samples=survey.counters.samples,
        length=identity.length,
        blocks=len(survey.entries),
        nbytes=survey.counters.nbytes,
        sealed=seal is not None,
        seconds=time.monotonic() - began,
    )


def _check_log(path: Path, survey: Survey, length: int) -> None:
    numbers = [entry.sequence for entry in survey.entries]
    if numbers != list(range(survey.blocks)):
        raise CorruptStoreError(f"{path}: the log names {len(numbers)} blocks, and there are {survey.blocks}")
    held = np.concatenate([np.empty(0, np.int64), *(entry.indices for entry in survey.entries)])
    unique, counts = np.unique(held, return_counts=True)
    if len(unique) != len(held):
        raise CorruptStoreError(f"{path}: sample {int(unique[counts > 1][0])} is there more than once")
    if len(unique) and not 0 <= int(unique[0]) <= int(unique[-1]) < length:
        raise CorruptStoreError(f"{path}: it holds samples that a dataset of {length} does not have")
    nbytes = sum(entry.head.nbytes for entry in survey.entries)
    if (survey.counters.samples, survey.counters.nbytes) != (len(held), nbytes):
        raise CorruptStoreError(
            f"{path}: its totals say {survey.counters.samples} samples in {survey.counters.nbytes} bytes, its blocks "
            f"hold {len(held)} in {nbytes}"
        )


def _check_index(path: Path, reader: Reader, seal: Seal) -> None:
    stored = reader.bytes_at(seal.offset, seal.nbytes)
    if stored[HEAD_BYTES:] != reader.pack_index()[HEAD_BYTES:]:
        raise CorruptStoreError(f"{path}: the index is not that of the log")
    reader.load_index(seal, verify=True)


def compare(path: Path, dataset: Any, count: int | None = None) -> int:
    """Compares cached samples with what a dataset gives, bit for bit, and returns how many were compared.

    Args:
        path: the store's folder.
        dataset: its source.
        count: how many, chosen at random; ``None`` for all.

    Raises:
        StaleCacheError: naming what differs.
        RandomSampleError: if the source draws random numbers, so that there is nothing to compare with.
    """
    opened = Store.open(path)
    reader = Reader(opened.data_path, opened.identity.length, opened.schemas, marks=False)
    reader.apply(opened.entries(0))
    length = min(len(dataset), opened.identity.length)
    source = Source(dataset, RandomnessGuard("error"))
    return check_samples(length if count is None else count, reader, source, length=length, path=path)
