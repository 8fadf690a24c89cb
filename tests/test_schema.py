"""flatten and schema: every supported type comes back exactly."""

from __future__ import annotations

import collections
import json
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from torchcache.errors import CorruptStoreError, UnsupportedSampleError
from torchcache.flatten import Uniform, flatten, flatten_many
from torchcache.leaves import DTYPE_NAMES
from torchcache.schema import Schema

Point = collections.namedtuple("Point", "x y")


class Typed(typing.NamedTuple):
    image: Any
    label: int = 3


def round_trip(sample: Any, *, fixed: bool = True, copy: bool = True) -> Any:
    """Through the bytes and the JSON, as a store does it."""
    spec, leaves = flatten(sample)
    schema = Schema.from_json(Schema(spec, tuple(dims if fixed else None for dims, _ in leaves)).to_json())
    values = []
    for column, (dims, data) in zip(schema.columns, leaves, strict=True):
        buffer = bytearray(64) + bytes(data) + bytes(64)
        values.append(column.decode(buffer, 64, dims, copy))
    return schema.rebuild(values)


def tensor_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(3 * dtype.itemsize, dtype=torch.uint8).fill_(1).view(dtype)


STORABLE = sorted((d for d in DTYPE_NAMES if not DTYPE_NAMES[d].startswith(("q", "bits"))), key=str)


@pytest.mark.filterwarnings("ignore:.*Complex.* support is experimental", "ignore:torch.quantize_per")
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_every_dtype_of_torch(dtype: torch.dtype, copy: bool) -> None:
    assert_same(round_trip(tensor_of(dtype), copy=copy), tensor_of(dtype))
    assert_same(round_trip(tensor_of(dtype)[0], copy=copy), tensor_of(dtype)[0])
    empty = torch.empty((2, 0, 3), dtype=dtype)
    assert_same(round_trip(empty, copy=copy), empty)


@pytest.mark.filterwarnings("ignore:.*Complex.* support is experimental", "ignore:torch.quantize_per")
@pytest.mark.parametrize("dtype", sorted(set(DTYPE_NAMES) - set(STORABLE), key=str), ids=str)
def test_dtypes_that_carry_more_than_bytes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedSampleError, match="cannot be stored"):
        flatten(torch.empty(0, dtype=dtype))


NAN = torch.tensor([0x7FC00001, 0xFFC12345 - (1 << 32), -(1 << 31)], dtype=torch.int32).view(torch.float32)
SAMPLES = {
    "bits of a NaN and -0.0": NAN,
    "bfloat16": torch.tensor([1.0, float("nan")]).bfloat16(),
    "channels last": torch.rand(1, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.rand(3, 4).T,
    "leaf that requires grad": torch.ones(2, requires_grad=True),
    "arrays": [np.arange(6, dtype=">f4"), np.array(3), np.zeros((0, 4), np.int64), np.array(["ab", "c"])],
    "times": (np.array("2020-01-01", "M8[D]"), np.timedelta64(5, "ms")),
    "records": np.array([(1, (2.0, 3.0))], dtype=[("a", "<i4"), ("b", ">f8", (2,))]),
    "aligned records": np.zeros(2, np.dtype([("a", "u1"), ("b", "<i8")], align=True)),
    "Fortran order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "NumPy scalars": (np.float32(1.5), np.int8(-1), np.bool_(True), np.str_("x"), np.complex64(1j)),
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**200, True, False],
    "floats": [0.0, -0.0, float("inf"), 5e-324, 1 + 2j, complex("-0-0j")],
    "texts": ["", "é", "\ud800", b"", b"\x00", bytearray(b"xy")],
    "constants": (None, ..., (), [], {}),
    "nested": {"a": [1, {"b": (torch.ones(2), [None])}], 5: "x", (1, "k"): {None: 2.5}},
    "keys that are equal": [{1: "int"}, {True: "bool"}, {1.0: "float"}],
    "ordered": collections.OrderedDict(b=1, a=2),
    "namedtuples": [Point(1, torch.zeros(1)), Typed("x")],
    "size": torch.Size([1, 2]),
    "detection": {
        "boxes": torch.empty(0, 4),
        "labels": torch.empty(0, dtype=torch.int64),
        "masks": torch.empty(0, 32, 32, dtype=torch.bool),
    },
}


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "ragged"])
@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_types(sample: Any, fixed: bool) -> None:
    assert_same(round_trip(sample, fixed=fixed), sample)


def test_thirty_levels() -> None:
    sample: Any = torch.ones(1)
    for _ in range(30):
        sample = {"x": [sample]}
    assert_same(round_trip(sample), sample)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"])
def test_pil_modes(mode: str) -> None:
    noise = Image.effect_noise((7, 5), 60)
    image = noise.convert("I").convert(mode) if mode == "I;16" else noise.convert("RGB").convert(mode)
    image.info["dpi"] = (72, 72)
    assert_same(round_trip(image), image)


def test_lazily_opened_image_may_vanish(tmp_path: Path) -> None:
    Image.effect_noise((8, 8), 60).convert("RGB").save(tmp_path / "x.jpg", quality=95)
    reference = Image.open(tmp_path / "x.jpg")
    expected = reference.tobytes()
    spec_and_leaves = flatten(Image.open(tmp_path / "x.jpg"))
    (tmp_path / "x.jpg").unlink()
    restored = round_trip(reference)
    assert (restored.tobytes(), restored.format, type(restored)) == (expected, "JPEG", Image.Image)
    assert len(spec_and_leaves[1]) > 2


def test_only_visible_bytes_are_taken() -> None:
    big = torch.zeros(1000, 1000)
    _, leaves = flatten([big[3], big[:, :2], torch.ones(1).expand(10, 10)])
    assert [len(data) for _, data in leaves] == [4000, 8000, 400]


def test_expanded_conjugate_and_strided_values() -> None:
    for value in (torch.ones(1).expand(3, 4), torch.tensor([1 + 2j, 3j]).conj(), torch.arange(9)[::2]):
        restored = round_trip(value)
        assert torch.equal(restored, value)
        assert restored.is_contiguous()
    negative = torch.tensor([1 + 2j]).conj().imag
    assert negative.is_neg()
    assert torch.equal(round_trip(negative), negative)
    assert np.array_equal(round_trip(np.arange(6)[::-1]), np.arange(6)[::-1])


SAME = [
    [(torch.full((2, 3), float(i)), i) for i in range(3)],
    [{"x": torch.tensor(i), "y": [i * 0.5, i % 2 == 0]} for i in range(3)],
    [torch.tensor([i], dtype=torch.int8) for i in range(3)],
]
DIFFERENT = [
    [1, 2**70],
    [1, True],
    [torch.ones(1), torch.ones(2)],
    [torch.ones(2), torch.ones(2, dtype=torch.float64)],
    [torch.ones(2, 3), torch.ones(3, 2).T],
    [torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last)] * 2,
    [torch.ones(2), torch.ones(2, requires_grad=True)],
    [torch.ones(2), torch.tensor([1 + 2j, 3j]).conj().imag],
    [torch.ones(2).bfloat16()] * 2,
    [torch.empty(0, 4)] * 2,
    [(1,), (1, 2)],
    [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
    [{1: "x"}, {True: "x"}],
    ["a", "bc"],
    [(), ()],
    [np.ones(2), np.ones(2)],
]


@pytest.mark.parametrize("samples", [*SAME, *DIFFERENT], ids=str)
def test_many_at_once_are_as_one_by_one(samples: list[Any]) -> None:
    found = {}
    for flat in flatten_many(range(len(samples)), samples):
        for row, index in enumerate(flat.indices):
            columns = [
                (column.dims, bytes(column.data[row]))
                if isinstance(column, Uniform)
                else (column[row][0], bytes(column[row][1]))
                for column in flat.columns
            ]
            found[index] = (repr(flat.spec), columns)
    for index, sample in enumerate(samples):
        spec, leaves = flatten(sample)
        assert found[index] == (repr(spec), [(dims, bytes(data)) for dims, data in leaves])


def test_what_is_detached_is_independent() -> None:
    several, single = [torch.zeros(3), torch.zeros(4)], torch.zeros(5)
    flats = [flat.detached() for flat in flatten_many([0, 1], several) + flatten_many([2], [single])]
    for tensor in [*several, single]:
        tensor.fill_(1)
    assert [bytes(data) for flat in flats for _, data in flat.columns[0]] == [bytes(12), bytes(16), bytes(20)]


def test_what_is_detached_has_arrays_of_its_own() -> None:
    (flat,) = flatten_many([0, 1], [torch.zeros(3), torch.zeros(3)])
    (own,) = flat.detached().columns
    (column,) = flat.columns
    assert isinstance(own, Uniform) and isinstance(column, Uniform)
    column.data.fill(1)
    assert bytes(own.data) == bytes(24)


@pytest.mark.parametrize(
    ("sample", "place"),
    [
        (object(), "sample: builtins.object"),
        ({"a": [1, object()]}, r"sample\['a'\]\[1\]: builtins.object"),
        ((torch.ones(1, requires_grad=True) * 2,), r"sample\[0\]: .*must be detached"),
        ([torch.ones(2).to_mkldnn()], r"sample\[0\]: .*mkldnn"),
        ({"x": np.array([object()])}, r"sample\['x'\]: .*Python objects"),
        ({object: 1}, "a dict key of builtins.type"),
        (torch.empty(1, device="meta"), "meta"),
    ],
)
def test_refused_types_are_named(sample: Any, place: str) -> None:
    with pytest.raises(UnsupportedSampleError, match=place):
        flatten(sample)


def test_a_sample_that_contains_itself() -> None:
    sample: list[Any] = []
    sample.append(sample)
    with pytest.raises(UnsupportedSampleError, match="contains itself"):
        flatten(sample)


def test_a_local_namedtuple_is_refused_when_it_is_stored() -> None:
    local = collections.namedtuple("local", "x")
    with pytest.raises(UnsupportedSampleError, match="cannot be found by that name"):
        flatten(local(1))


HOSTILE: list[Any] = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff",
    {"spec": ["int"], "shapes": []},
    {"spec": ["int"], "shapes": [[], []]},
    {"spec": ["int"], "shapes": [[1]]},
    {"spec": ["eval", "x"], "shapes": [[]]},
    {"spec": ["tensor", "dtype", 0, [], 0], "shapes": [[]]},
    {"spec": ["tensor", "float32", -1, [], 0], "shapes": [[]]},
    {"spec": ["tensor", "float32", 2, [0, 0], 0], "shapes": [None]},
    {"spec": ["tensor", "float32", 1, [], 0], "shapes": [[-5]]},
    {"spec": ["tensor", "float32", 1, [], 0], "shapes": [[1 << 60]]},
    {"spec": ["tensor", "float32", 1, [], 0], "shapes": [[1.5]]},
    {"spec": ["ndarray", '"|O"', 1, 0], "shapes": [None]},
    {"spec": ["ndarray", '"nonsense"', 1, 0], "shapes": [None]},
    {"spec": ["ndarray", "[[1]]", 1, 0], "shapes": [None]},
    {"spec": ["dict", ["a"], []], "shapes": []},
    {"spec": ["dict", ["a", "a"], [["none"], ["none"]]], "shapes": []},
    {"spec": ["dict", [["call", "x"]], [["none"]]], "shapes": []},
    {"spec": ["tuple"], "shapes": []},
    {"spec": [], "shapes": []},
    {"spec": "int", "shapes": [[]]},
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: str(text)[:60])
def test_hostile_schemas_are_refused(text: Any) -> None:
    with pytest.raises(CorruptStoreError):
        Schema.from_json(text if isinstance(text, bytes) else json.dumps(text).encode())


def test_hostile_depth() -> None:
    with pytest.raises(CorruptStoreError):
        Schema.from_json(b'{"shapes":[],"spec":' + b'["list",[' * 200 + b'["none"]' + b"]]" * 200 + b"}")
    with pytest.raises(CorruptStoreError):
        Schema.from_json(b"[" * 1_000_000)


@pytest.mark.parametrize("module", ["os", "subprocess", "this", "helpers"])
def test_a_name_in_a_schema_calls_and_imports_nothing(module: str) -> None:
    spec = ["namedtuple", module, "system", ["x"], [["int"]]]
    with pytest.raises(UnsupportedSampleError, match="not among the imported modules"):
        Schema.from_json(json.dumps({"spec": spec, "shapes": [[]]}).encode())


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.complex_numbers(),
    st.text(st.characters(codec=None)),
    st.binary(),
    st.lists(st.integers(), min_size=9, max_size=12),
    st.lists(st.floats(), min_size=9, max_size=12).map(tuple),
    st.lists(st.one_of(st.text(), st.none(), st.floats(allow_nan=False)), min_size=9, max_size=12),
    st.sets(st.one_of(st.integers(), st.text(st.characters(codec=None)))),
    st.frozensets(st.binary(), max_size=4),
    st.dates(),
    st.datetimes(),
    st.timedeltas(),
    st.decimals(),
    st.fractions(),
    st.uuids(),
    st.slices(5),
    st.sampled_from(STORABLE).map(tensor_of),
    st.lists(st.integers(0, 3), max_size=3).map(lambda shape: np.zeros(shape, np.int16)),
)
samples = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.lists(children, max_size=2).map(collections.deque),
        st.builds(Point, children, children),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.binary()), children, max_size=4),
    ),
    max_leaves=12,
)


@pytest.mark.filterwarnings("ignore:.*Complex.* support is experimental", "ignore:torch.quantize_per")
@settings(max_examples=300, deadline=None)
@given(samples, st.booleans(), st.booleans())
def test_arbitrary_samples(sample: Any, fixed: bool, copy: bool) -> None:
    restored = round_trip(sample, fixed=fixed, copy=copy)
    assert_same(restored, sample)
