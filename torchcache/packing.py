"""Samples that are published together → blocks: which share one, and under which schema."""

from __future__ import annotations

from collections.abc import Sequence

from torchcache import block as blocks
from torchcache.flatten import Flat, Uniform
from torchcache.leaves import Dims, Spec
from torchcache.schema import Schema
from torchcache.store import Store

BLOCK_BYTES = 64 << 20  # a batch larger than this becomes several blocks
LARGEST_SAMPLE_BYTES = (1 << 32) - (1 << 20)  # LMDB counts a value's bytes with 32 bits; the rest is head and padding
MAX_SCHEMAS_PER_SPEC = 8  # then one in which every shape may differ


def pack(samples: Sequence[Flat], store: Store) -> list[tuple[bytearray, list[int]]]:
    """Makes blocks of samples, none larger than ``BLOCK_BYTES`` unless a sample is.

    Args:
        samples: taken apart.
        store: knows the schemas, and learns new ones.

    Returns:
        The blocks, each with the indices of its samples.
    """
    groups: dict[Spec, list[Flat]] = {}
    for flat in samples:
        groups.setdefault(flat.spec, []).append(flat)
    packed = []
    for spec, flats in groups.items():
        distinct = list(dict.fromkeys([shapes for flat in flats for shapes in _shapes(flat)]))
        schema = _choose_schema(spec, distinct, store.schemas)
        schema_id = store.schema_id(schema)
        for parts in _blocks(flats):
            block = blocks.encode(schema, schema_id, parts, blocks.PAGE_BYTES)
            packed.append((block, [index for part in parts for index in part.indices]))
    return packed


def without_oversized(samples: Flat) -> Flat:
    """Those of the samples that are small enough to be stored."""
    if samples.nbytes <= LARGEST_SAMPLE_BYTES:
        return samples
    return samples.rows([row for row, nbytes in enumerate(samples.sizes()) if nbytes <= LARGEST_SAMPLE_BYTES])


def _blocks(samples: Sequence[Flat]) -> list[list[Flat]]:
    """Which samples of one schema share a block."""
    found: list[list[Flat]] = []
    room = 0
    for part in [part for flat in samples for part in _split(flat)]:
        nbytes = part.nbytes
        if not found or nbytes > room:
            found.append([])
            room = BLOCK_BYTES
        found[-1].append(part)
        room -= nbytes
    return found


def _split(samples: Flat) -> list[Flat]:
    """Parts that are each small enough for a block, or a single sample."""
    if samples.nbytes <= BLOCK_BYTES:
        return [samples]
    parts: list[list[int]] = []
    room = 0
    for row, size in enumerate(samples.sizes()):
        if not parts or size > room:
            parts.append([])
            room = BLOCK_BYTES
        parts[-1].append(row)
        room -= size
    return [samples.rows(rows) for rows in parts]


def _shapes(samples: Flat) -> list[tuple[Dims, ...]]:
    """The distinct combinations of shapes among the samples."""
    if all(isinstance(column, Uniform) for column in samples.columns):
        return [tuple(column.dims for column in samples.columns if isinstance(column, Uniform))]
    count = len(samples.indices)
    dims = [
        [column.dims] * count if isinstance(column, Uniform) else [dims for dims, _ in column]
        for column in samples.columns
    ]
    return list(dict.fromkeys(zip(*dims, strict=True)))


def _choose_schema(spec: Spec, distinct: Sequence[tuple[Dims, ...]], known: Sequence[Schema]) -> Schema:
    """The schema for samples of one structure: a known one that fits, else one that fixes what has never differed."""
    candidates = [schema for schema in known if schema.spec == spec]
    fitting = [schema for schema in candidates if all(schema.fits(shapes) for shapes in distinct)]
    if fitting:
        return max(fitting, key=lambda schema: sum(shape is not None for shape in schema.shapes))
    fresh = len(candidates) < MAX_SCHEMAS_PER_SPEC
    chosen: list[Dims | None] = []
    for i, column in enumerate(Schema(spec, distinct[0] if distinct else ()).columns):
        seen: set[Dims | None] = {shapes[i] for shapes in distinct}
        seen.update(schema.shapes[i] for schema in candidates)
        fixed = column.ndim == 0 or (fresh and len(seen) == 1 and not column.is_raw)
        chosen.append(distinct[0][i] if fixed else None)
    return Schema(spec, tuple(chosen))
