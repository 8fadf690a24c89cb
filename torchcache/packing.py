"""Samples of a batch → blocks: which share one, and under which schema."""

from __future__ import annotations

from collections.abc import Sequence

from torchcache import block as blocks
from torchcache.flatten import Dims, Flat, Spec, Uniform
from torchcache.schema import Schema
from torchcache.store import Store

BLOCK_BYTES = 64 << 20  # a batch larger than this becomes several blocks
MAX_SCHEMAS_PER_SPEC = 8  # then one in which every shape may differ


def pack(samples: Sequence[Flat], store: Store) -> list[tuple[bytearray, list[int]]]:
    """Makes blocks of samples, none larger than ``BLOCK_BYTES`` unless a sample is.

    Args:
        samples: taken apart.
        store: knows the schemas, and learns new ones.

    Returns:
        The blocks, each with the indices of its samples.
    """
    packed = []
    for part in [part for flat in samples for part in _split(flat)]:
        schema = _choose_schema(part.spec, _shapes(part), store.schemas)
        packed.append((blocks.encode(schema, store.schema_id(schema), part, blocks.PAGE_BYTES), part.indices))
    return packed


def _split(samples: Flat) -> list[Flat]:
    sizes = samples.sizes()
    if sum(sizes) <= BLOCK_BYTES:
        return [samples]
    parts: list[list[int]] = []
    room = 0
    for row, size in enumerate(sizes):
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
