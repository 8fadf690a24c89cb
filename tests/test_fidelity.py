"""Every type that a sample may hold comes back exactly: through a store, and in the batches of a DataLoader."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import pathlib
import pickle
import sys
import types
import uuid
import warnings
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same
from PIL import Image
from torch.utils.data import DataLoader, default_collate
from torchvision import tv_tensors

import torchcache
from torchcache import CachedDataset, errors
from torchcache.flatten import flatten
from torchcache.leaves import DTYPE_NAMES
from torchcache.schema import Schema

# What torch has today. A new dtype fails the test below until somebody has looked at how it is stored.
STORED_DTYPES = """
    bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
    complex32 complex64 complex128 bcomplex32
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
    uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7
"""
REFUSED_DTYPES = "qint8 quint8 qint32 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16"


def test_all_dtypes_of_torch_are_in_the_table() -> None:
    assert set(DTYPE_NAMES.values()) <= set((STORED_DTYPES + REFUSED_DTYPES).split())
    assert {d for d in vars(torch).values() if isinstance(d, torch.dtype)} == set(DTYPE_NAMES)


class Colour(enum.Enum):
    RED = 1
    GREEN = "g"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Box:
    corner: Any
    label: str = "x"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenBox:
    corner: Any
    size: int = 3


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """Of the shape of Hugging Face's ``BatchEncoding``."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self._encodings = None
        self._n_sequences = 1


class MetaTensor(torch.Tensor):
    """Of the shape of MONAI's: a tensor with an affine and the name of its file."""

    affine: torch.Tensor
    meta: dict[str, Any]


def meta_tensor(i: int) -> MetaTensor:
    x = torch.full((1, 2, 3), float(i)).as_subclass(MetaTensor)
    x.affine = torch.eye(4) * i
    x.meta = {"file": f"{i}.nii", "space": [1.0, 2.0]}
    return x


def parameter(i: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((2,), float(i)))


def masked(i: int) -> Any:
    x: Any = np.ma.masked_array([1.0, 2.0, i], [False, True, False], fill_value=-1.0)
    x.harden_mask()
    return x


def coo(i: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, float(i)]), (2, 3), check_invariants=True
    )


def picture(i: int) -> Image.Image:
    image = Image.new("P", (3, 2), i)
    image.putpalette([i, 1, 2, 3, 4, 5])
    image.info = {"transparency": 1, "dpi": (72, 72), "unknown": object()}
    return image


UTC = datetime.timezone.utc
EAST = datetime.timezone(datetime.timedelta(hours=5, minutes=30), "EAST")
NOON = datetime.datetime(2024, 5, 6, 12, 0, 1, 7, tzinfo=UTC)

# name → sample of an index; several indices, so that batches and blocks hold different values.
TYPES: dict[str, Any] = {
    "tv Image": lambda i: tv_tensors.Image(torch.full((3, 4, 5), i, dtype=torch.uint8)),
    "tv Video": lambda i: tv_tensors.Video(torch.full((2, 3, 4, 5), i, dtype=torch.uint8)),
    "tv Mask": lambda i: tv_tensors.Mask(torch.full((4, 5), i > 1)),
    "tv BoundingBoxes": lambda i: tv_tensors.BoundingBoxes(
        torch.full((1, 4), float(i)), format="XYWH", canvas_size=(10, 20 + i)
    ),
    "detection": lambda i: (
        tv_tensors.Image(torch.full((3, 4, 5), i, dtype=torch.uint8)),
        {
            "boxes": tv_tensors.BoundingBoxes(torch.empty(0, 4), format="CXCYWH", canvas_size=(4, 5)),
            "labels": torch.empty(0, dtype=torch.int64),
            "area": torch.tensor(float(i)),
        },
    ),
    "tensor subclass": meta_tensor,
    "parameter": parameter,
    "frozen parameter": lambda i: torch.nn.Parameter(torch.full((2,), float(i)), requires_grad=False),
    "token ids": lambda i: {"input_ids": list(range(300 + i)), "mask": [True] * (300 + i), "score": [0.5, -0.0] * 9},
    "long tuples": lambda i: (tuple(range(20)), (float("nan"), -0.0) * 9, (i == 1,) * 12, tuple("abcdefghijk")),
    "large integers": lambda i: [2**63 + i] * 12,
    "mixed lists": lambda i: [[1, True, 1.0, None, "x", -0.0, 2**70] * 2, [1, 2.5], [[i, [i]]], [{"a": {"b": []}}]],
    "what JSON changes": lambda i: [["\ud800"] * 9, [float("nan")] * 9, [[float("inf")]], [["\ud800\udc00"]], [(1,)]],
    "words": lambda i: ["é", "\U0001f600", "", '"\\\n\x00'] * 3,
    "annotations": lambda i: [{"bbox": [1.5, 2.0, 3.0, i], "id": k, "segmentation": [[0.1] * 8]} for k in range(i)],
    "set": lambda i: {i, "a", None, (1, 2)},
    "frozenset": lambda i: frozenset(range(i * 20)),
    "empty set": lambda i: set(),
    "deque": lambda i: [collections.deque([i, "x"], maxlen=3), collections.deque(range(100))],
    "defaultdict": lambda i: [collections.defaultdict(list, a=[i]), collections.defaultdict(None, {1: i})],
    "ordered dict": lambda i: collections.OrderedDict(b=i, a=torch.tensor(i)),
    "user dict": lambda i: collections.UserDict(a=torch.tensor([i]), b="x"),
    "user list": lambda i: collections.UserList([i, "x"]),
    "batch encoding": lambda i: Encoding({"input_ids": torch.tensor([i, 2]), "mask": [1, 1]}),
    "enum": lambda i: (Colour.RED, Colour.GREEN if i else Colour.RED),
    "int enum": lambda i: Level.LOW,
    "flag": lambda i: [Access.READ, Access.READ | Access.WRITE, Access(0)],
    "paths": lambda i: [pathlib.Path(f"a/{i}"), pathlib.PurePosixPath("/b"), pathlib.PureWindowsPath("c:\\d")],
    "date": lambda i: datetime.date(2024, 1, 1 + i),
    "datetime": lambda i: [NOON.replace(tzinfo=tz, fold=fold) for tz in (None, UTC, EAST) for fold in (0, 1)],
    "time": lambda i: [datetime.time(1, 2, i), datetime.time(3, tzinfo=EAST, fold=1)],
    "timedelta": lambda i: datetime.timedelta(-1, i, 3),
    "slice": lambda i: [slice(i), slice(1, None, -1)],
    "range": lambda i: range(i, 100, 3),
    "complex": lambda i: complex(-0.0, i),
    "decimal": lambda i: [decimal.Decimal(s) for s in ("1.10", "-0", "NaN123", "1E+999", "-Infinity")],
    "fraction": lambda i: fractions.Fraction(i + 1, 3),
    "uuid": lambda i: uuid.UUID(int=i),
    "dataclass": lambda i: Box(torch.full((2,), i), "é"),
    "frozen dataclass": lambda i: FrozenBox([FrozenBox(i), {"a": Box(None)}]),
    "masked array": masked,
    "masked array without a mask": lambda i: np.ma.masked_array([1, i]),
    "structured masked array": lambda i: np.ma.masked_array([(1, 2.0)], [(True, False)], dtype="i4,f8"),
    "uncoalesced": coo,
    "coalesced": lambda i: coo(i).coalesce(),
    "csr": lambda i: torch.eye(3).mul(i).to_sparse_csr(),
    "csc": lambda i: torch.eye(3).mul(i + 1).to_sparse_csc(),
    "bsr": lambda i: torch.ones(4, 4).to_sparse_bsr((2, 2)),
    "picture": picture,
    "strings of NumPy": lambda i: [
        np.str_("é\0"),
        np.str_(""),
        np.bytes_(b"x\0"),
        np.bytes_(b"\0"),
        np.array(["", "é"]),
    ],
    "dates of NumPy": lambda i: [
        np.datetime64("2020", "Y"),
        np.timedelta64("NaT", "ms"),
        np.array(["2020"], "M8[25s]"),
    ],
    "scalars": lambda i: torch.tensor(3.5),
    "zero size": lambda i: (torch.empty(2, 0, 3), np.zeros((0, 4), ">i2")),
    "keys": lambda i: {1: i, (2, "a"): i, None: i, 1.5: i, b"x": i, False: i},
}


def as_bare(sample: Any) -> Any:
    """What a picture's header says in objects of unknown kinds is not kept; everything else is."""
    if isinstance(sample, Image.Image):
        sample.info.pop("unknown", None)
    return sample


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning", "ignore:Sparse B:UserWarning")
@pytest.mark.parametrize("make", TYPES.values(), ids=TYPES)
def test_types_through_a_store(cache_dir: Path, make: Any) -> None:
    source = [make(i) for i in range(3)]
    cached = CachedDataset(source, key="k")
    misses = [cached[i] for i in (0, 1)]
    assert all(miss is sample for miss, sample in zip(misses, source, strict=False))
    cached.fill(progress=False)
    for _ in range(2):
        for i in range(3):
            assert_same(cached[i], as_bare(make(i)))
        assert cached.stats.source_reads == 3
        cached.close()


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning", "ignore:Sparse B:UserWarning")
@pytest.mark.parametrize("make", TYPES.values(), ids=TYPES)
def test_batches_are_those_of_the_bare_dataset(cache_dir: Path, make: Any) -> None:
    source = [make(i) for i in range(4)]
    cached = CachedDataset(source, key="k")
    for state in ("cold", "half-filled", "warm"):
        if state == "half-filled":
            cached = CachedDataset(source, key="h")
            assert cached[1] is not None
        expected, error = collated(source)
        if error is None:
            batches = list(DataLoader(cached, batch_size=2))
            assert_same(batches, expected)
        else:
            with pytest.raises(type(error)):
                list(DataLoader(cached, batch_size=2))
        cached.fill(progress=False)


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning", "ignore:Sparse B:UserWarning")
def test_half_filled_stores_with_workers(cache_dir: Path) -> None:
    """All types in one dataset, of which every other sample is cached."""
    crossing = {name: make for name, make in TYPES.items() if crosses_processes(make(0))}
    assert len(crossing) > 0.9 * len(TYPES)
    source = [make(i) for make in crossing.values() for i in range(3)]
    expected = [make(i) for make in crossing.values() for i in range(3)]
    cached = CachedDataset(source, key="k")
    for i in range(0, len(source), 2):
        cached[i]
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(1)).tolist()
    settings: dict[str, Any] = {"batch_size": 5, "sampler": order, "num_workers": 2, "collate_fn": as_list}
    bare = [as_bare(sample) for batch in DataLoader(expected, **settings) for sample in batch]  # type: ignore[arg-type]
    for _ in range(2):
        assert_same([as_bare(sample) for batch in DataLoader(cached, **settings) for sample in batch], bare)
        assert cached.stats.samples_cached == len(source)
    assert cached.stats.source_reads == len(source)


def as_list(samples: Any) -> Any:
    return samples


def crosses_processes(sample: Any) -> bool:
    """Whether PyTorch can send it from a worker: one that cannot be sent fails without the cache as well."""
    try:
        pickle.loads(bytes(ForkingPickler.dumps(sample)))
    except Exception:
        return False
    return True


def collated(source: list[Any]) -> tuple[list[Any], Exception | None]:
    try:
        return [default_collate(source[:2]), default_collate(source[2:])], None
    except Exception as error:
        return [], error


def test_key_points(cache_dir: Path) -> None:
    if not hasattr(tv_tensors, "KeyPoints"):
        pytest.skip("this torchvision has none")
    points = tv_tensors.KeyPoints(torch.rand(3, 2), canvas_size=(8, 9))
    cached = CachedDataset([points])
    cached.fill(progress=False)
    assert_same(cached[0], points)


def test_an_attribute_of_a_box_is_kept(cache_dir: Path) -> None:
    boxes: Any = TYPES["tv BoundingBoxes"](1)
    cached = CachedDataset([boxes])
    cached.fill(progress=False)
    hit = cached[0]
    assert (hit.format, hit.canvas_size) == (tv_tensors.BoundingBoxFormat.XYWH, (10, 21))
    assert getattr(hit, "clamping_mode", None) == getattr(boxes, "clamping_mode", None)


def test_writing_into_a_hit_leaves_the_store_alone(cache_dir: Path) -> None:
    make = TYPES["detection"]
    cached = CachedDataset([make(0), make(1)])
    cached.fill(progress=False)
    image, target = cached[1]
    image.zero_()
    target["area"] += 1
    assert_same(cached[1], make(1))


@pytest.mark.parametrize("n", [9, 1_000, 100_000])
def test_a_long_list_is_one_leaf_without_a_schema_of_its_own(n: int) -> None:
    assert flatten([1] * n)[0] == flatten(list(range(n + 1)))[0]
    assert len(flatten([1] * n)[1]) == 1
    assert flatten([{"a": [k]} for k in range(n)])[0] == flatten([{"b": 1}])[0]


def test_annotations_share_a_schema() -> None:
    assert len({flatten(TYPES["annotations"](i))[0] for i in range(1, 9)}) == 1


def non_leaf_subclass() -> Any:
    return torch.nn.Parameter(torch.ones(2)).as_subclass(MetaTensor)


def extended_box() -> Box:
    box = Box(1)
    box.extra = 2  # type: ignore[attr-defined]
    return box


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


REFUSED: dict[str, tuple[Any, str]] = {
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "cannot be stored"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "cannot be stored",
    ),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "cannot be stored"),
    "meta": (lambda: torch.empty(2, device="meta"), "on meta"),
    "sparse leaf": (lambda: torch.eye(2).to_sparse().requires_grad_(), "requires_grad=True"),
    "part of a graph": (non_leaf_subclass, "must be detached"),
    "dispatching subclass": (lambda: torch.ones(2).as_subclass(Wrapper), "Wrapper cannot be stored"),
    "factory": (lambda: collections.defaultdict(lambda: 0), "defaultdict that makes"),
    "zone": (lambda: NOON.replace(tzinfo=pytest.importorskip("zoneinfo").ZoneInfo("UTC")), "convert it to UTC"),
    "extra attribute": (extended_box, "other attributes than its fields"),
    "record array": (lambda: np.rec.array([(1, 2.0)]), "recarray cannot be stored"),
    "record dtype": (lambda: np.rec.array([(1, 2.0)]).view(np.ndarray), "cannot be written down exactly"),
    "dtype with metadata": (lambda: np.zeros(2, np.dtype("i4", metadata={"a": 1})), "cannot be written down"),
    "function": (lambda: len, "cannot be stored"),
    "open file": (lambda: open(__file__), "cannot be stored"),  # noqa: SIM115
    "object array": (lambda: np.array([None]), "Python objects"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per")
@pytest.mark.filterwarnings("ignore:.*torch.quantize_per.*", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("make", "match"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stored_exactly_is_refused(make: Any, match: str) -> None:
    flatten([np.zeros(2, np.int32), np.zeros(1, np.rec.array([(1, 2.0)]).dtype.descr)])  # dtypes that are equal to some
    with pytest.raises(errors.UnsupportedSampleError, match=match):
        flatten({"x": [make()]})


class Scan:
    def __init__(self, volume: torch.Tensor, spacing: float) -> None:
        self.volume = volume
        self.spacing = spacing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scan) and torch.equal(self.volume, other.volume) and self.spacing == other.spacing

    __hash__ = None  # type: ignore[assignment]


def register_scan() -> None:
    torchcache.register(
        Scan, lambda scan: ([scan.volume], scan.spacing), lambda parts, spacing: Scan(parts[0], spacing)
    )


def test_a_registered_class(cache_dir: Path) -> None:
    source = [{"scan": Scan(torch.ones(i + 1), i / 2)} for i in range(3)]
    with pytest.raises(errors.UnsupportedSampleError, match=r"Scan cannot be stored.*torchcache.register"):
        CachedDataset(source, key="k")[0]
    register_scan()
    cached = CachedDataset(source, key="k")
    cached.fill(progress=False)
    assert [cached[i] for i in range(3)] == source
    assert cached[1] is not source[1]


def test_a_class_may_be_registered_after_it_was_stored() -> None:
    @dataclasses.dataclass
    class Late:
        x: int

    Late.__qualname__ = "Late"
    vars(sys.modules[__name__])["Late"] = Late
    assert flatten(Late(1))[0][0] == "dataclass"
    torchcache.register(Late, lambda late: ([late.x], None), lambda parts, _: Late(*parts))
    assert flatten(Late(1))[0][0] == "registered"


@pytest.mark.parametrize("arguments", [(1, len, len), (Scan, None, len), (Scan, len, 3), (dict, len, len)], ids=str)
def test_bad_registrations(arguments: Any) -> None:
    with pytest.raises(TypeError, match="register"):
        torchcache.register(*arguments)


def test_a_name_in_a_store_never_imports() -> None:
    lazy: Any = types.ModuleType("lazy_module")
    asked: list[str] = []
    lazy.__getattr__ = asked.append
    sys.modules["lazy_module"] = lazy
    try:
        for kind, structure in {
            "enum": ["lazy_module", "Colour"],
            "dataclass": ["lazy_module", "Box", ["x"]],
            "state": ["this", "Encoding"],
            "subclass": ["torch.distributed.tensor", "DTensor", 0],
            "registered": ["lazy_module", "Scan"],
        }.items():
            with pytest.raises(errors.UnsupportedSampleError, match="before opening the store"):
                Schema.from_json(_json([kind, structure, []]))
        assert asked == []
        assert "this" not in sys.modules
    finally:
        del sys.modules["lazy_module"]


def _json(spec: Any) -> bytes:
    return json.dumps({"spec": spec, "shapes": []}).encode()


@pytest.mark.parametrize(
    "spec",
    [
        ["enum", ["subprocess", "Popen"], []],
        ["dataclass", ["subprocess", "Popen", ["args"]], []],
        ["dataclass", [__name__, "Box", ["corner"]], []],
        ["state", ["collections", "OrderedDict"], []],
        ["subclass", ["builtins", "dict", 0], []],
        ["namedtuple", "os", "stat_result", ["st_mode"], [["none"]]],
    ],
    ids=str,
)
def test_a_name_of_another_kind_of_class_is_refused(spec: Any) -> None:
    with pytest.raises(errors.UnsupportedSampleError, match="before opening the store"):
        Schema.from_json(_json(spec))


@pytest.mark.parametrize(
    "spec",
    [
        ["defaultdict", ["eval"], [["none"]]],
        ["defaultdict", [["list"]], [["none"]]],
        ["path", ["Popen"], [["none"]]],
        ["sparse", ["strided", 0], []],
        ["set", ["x"], [["none"]]],
        ["datetime", ["x"], [["none"]]],
        ["nothing", [], []],
        ["listof", "str"],
        ["pil"],
    ],
    ids=str,
)
def test_hostile_objects_are_refused(spec: Any) -> None:
    with pytest.raises(errors.CorruptStoreError):
        Schema.from_json(_json(spec))


def test_contents_that_make_no_object_are_an_error() -> None:
    for spec in (("date", (), (("str",),)), ("set", (), (("int",),)), ("sparse", ("sparse_coo", 0), (("int",),) * 3)):
        leaves = {"str": "x", "int": 5}
        schema = Schema(spec, tuple(() if child == ("int",) else None for child in spec[-1]))
        with pytest.raises(errors.CorruptStoreError, match="cannot be made"):
            schema.rebuild([leaves[child[0]] for child in spec[-1]])


def test_sparse_indices_are_checked() -> None:
    spec, _ = flatten(coo(1))
    rebuild = Schema(spec, (None,) * 4).rebuild
    with pytest.raises(errors.CorruptStoreError, match="cannot be made"):
        rebuild([torch.tensor([[0, 9], [1, 1]]), torch.ones(2), 2, 3])


class Opaque:
    def __init__(self, x: Any) -> None:
        self.state = [x]

    def __getstate__(self) -> Any:
        return self.state

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Unpicklable(Opaque):
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


def test_pickled_objects(cache_dir: Path) -> None:
    source = [{"x": torch.tensor(i), "y": [Opaque(i), i]} for i in range(4)]
    with pytest.raises(errors.UnsupportedSampleError, match="allow_pickle=True"):
        CachedDataset(source, key="k")[0]
    cached = CachedDataset(source, key="k", allow_pickle=True)
    cached.fill(progress=False)
    assert [cached[i]["y"][0].state for i in range(4)] == [[i] for i in range(4)]
    assert_same([cached[i]["x"] for i in range(4)], [sample["x"] for sample in source])
    cached.close()
    with pytest.raises(errors.StoreMismatchError, match="allow_pickle=True"):
        CachedDataset(source, key="k")
    with pytest.raises(errors.StoreMismatchError, match="allow_pickle=True"):
        CachedDataset.open(cached.path)
    assert CachedDataset.open(cached.path, allow_pickle=True)[2]["y"][0].state == [2]


def test_a_store_without_pickle_is_not_opened_with_it(cache_dir: Path) -> None:
    cached = CachedDataset([1, 2], key="k")
    cached.fill(progress=False)
    cached.close()
    with pytest.raises(errors.StoreMismatchError, match="allow_pickle=False"):
        CachedDataset([1, 2], key="k", allow_pickle=True)


def test_what_cannot_be_pickled_either(cache_dir: Path) -> None:
    with pytest.raises(errors.UnsupportedSampleError, match=r"cannot be pickled \(no\)"):
        CachedDataset([Unpicklable(1)], key="k", allow_pickle=True)[0]


def test_a_store_cannot_smuggle_pickle_in(cache_dir: Path) -> None:
    cached = CachedDataset([1, 2], key="k")
    cached[0]
    cached.close()
    store = torchcache.store.Store.open(cached.path)
    with pytest.raises(errors.CorruptStoreError, match="pickled objects where none are allowed"):
        store.schema_id(Schema(("pickle",), (None,)))


def test_a_class_that_is_imported_too_late_costs_speed_and_nothing_else(cache_dir: Path) -> None:
    module = types.ModuleType("comes_late")
    exec("import enum\nclass Late(enum.Enum):\n    A = 1\n", vars(module))
    sys.modules["comes_late"] = module
    source = [module.Late.A] * 3
    cached = CachedDataset(source, key="k")
    cached.fill(progress=False)
    cached.close()
    del sys.modules["comes_late"], cached
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        again = CachedDataset(source, key="k")
        assert [again[i] for i in range(3)] == source
    assert [w.category for w in seen] == [errors.CacheBypassWarning]
    assert "import comes_late before" in str(seen[0].message)
