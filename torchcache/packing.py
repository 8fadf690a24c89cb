"""Samples of a batch → blocks: which share one, and under which schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchcache import block as blocks
from torchcache.flatten import Dims, Leaf, Spec
from torchcache.schema import Schema
from torchcache.store import Store

BLOCK_BYTES = 64 << 20  # a batch larger than this becomes several blocks
MAX_SCHEMAS_PER_SPEC = 8  # then one in which every shape may differ

Flat = tuple[Spec, list[Leaf]]  # a sample taken apart


def pack(samples: Mapping[int, Flat], store: Store) -> list[tuple[bytearray, list[int]]]:
    """Makes blocks of samples: one a structure, none larger than ``BLOCK_BYTES`` unless a sample is.

    Args:
        samples: for each index the sample.
        store: knows the schemas, and learns new ones.

    Returns:
        The blocks, each with the indices of its samples.
    """
    groups: dict[Spec, list[int]] = {}
    for index, (spec, _) in samples.items():
        groups.setdefault(spec, []).append(index)
    packed = []
    for spec, indices in groups.items():
        for part in _split(indices, [blocks.estimated_nbytes(samples[i][1]) for i in indices]):
            leaves = [samples[i][1] for i in part]
            schema = _choose_schema(spec, [[dims for dims, _ in sample] for sample in leaves], store.schemas)
            packed.append((blocks.encode(schema, store.schema_id(schema), leaves, store.min_block_bytes()), part))
    return packed


def _split(indices: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    parts: list[list[int]] = []
    room = 0
    for index, size in zip(indices, sizes, strict=True):
        if not parts or size > room:
            parts.append([])
            room = BLOCK_BYTES
        parts[-1].append(index)
        room -= size
    return parts


def _choose_schema(spec: Spec, samples: Sequence[Sequence[Dims]], known: Sequence[Schema]) -> Schema:
    """The schema for samples of one structure: a known one that fits, else one that fixes what has never differed."""
    distinct = {tuple(dims) for dims in samples}
    candidates = [schema for schema in known if schema.spec == spec]
    fitting = [schema for schema in candidates if all(schema.fits(dims) for dims in distinct)]
    if fitting:
        return max(fitting, key=lambda schema: sum(shape is not None for shape in schema.shapes))
    shapes: list[Dims | None] = []
    fresh = len(candidates) < MAX_SCHEMAS_PER_SPEC
    for i, kind in enumerate(Schema(spec, tuple(samples[0])).columns):
        seen: set[Dims | None] = {dims[i] for dims in distinct}
        seen.update(schema.shapes[i] for schema in candidates)
        fixed = kind.ndim == 0 or (fresh and len(seen) == 1 and not kind.is_raw)
        shapes.append(samples[0][i] if fixed else None)
    return Schema(spec, tuple(shapes))
