"""Identity: what makes two datasets the same, what makes them different, and what cannot be told."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import datetime
import enum
import fractions
import functools
import importlib
import io
import itertools
import logging
import os
import pathlib
import pickle
import random
import re
import socket
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset
from torchvision import datasets, transforms, tv_tensors
from torchvision.transforms import v2

from torchcache.errors import FingerprintError
from torchcache.fingerprint import Fingerprint, fingerprint

ROOT = pathlib.Path(__file__).parents[1]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Point(collections.namedtuple("Point", "x y")):
    pass


@dataclasses.dataclass(frozen=True)
class Record:
    name: str = "a"
    tags: tuple[str, ...] = ()


@dataclasses.dataclass
class Slotted:
    __slots__ = ("a", "b")
    a: int
    b: list[int]


class Node:
    def __init__(self, name: str) -> None:
        self.name = name
        self.others: list[Node] = []


class Digits(Dataset[Any]):
    def __init__(self, n: int = 4, transform: Any = None) -> None:
        self.data = np.arange(n)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        value = self.data[index]
        return self.transform(value) if self.transform else value


def run(source: str, name: str = "__main__", **names: Any) -> dict[str, Any]:
    """The names that a script defines."""
    space = {"__name__": name, **names}
    exec(compile(textwrap.dedent(source), "<ipython-input-1>", "exec"), space)
    return space


# Data


VALUES: list[Any] = [
    None, True, 0, 1, -1, 2**80, 0.0, -0.0, 1.5, float("inf"), 1j, "", "a", "\udcff", b"", b"a", bytearray(b"a"), ...,
    [], [1], [1, 2], [2, 1], [[1], 2], [[1, 2]], (), (1,), (1, 2), {}, {"a": 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1},
    set(), {1}, {1, 2}, frozenset(), frozenset({1, 2}), range(3), range(4), slice(1, 2), slice(1, 3), ["1"], [1.0],
    [True], [2**80], pathlib.PurePosixPath("/a"), pathlib.PureWindowsPath("/a"), "/a", datetime.date(2020, 1, 1),
    datetime.timedelta(1), datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc), datetime.datetime(2020, 1, 1),
    re.compile("a"), re.compile("a", re.IGNORECASE), fractions.Fraction(1, 3), Colour.RED, Colour.BLUE, Point(1, 2),
    Record(), Record("b"), Slotted(1, []), Slotted(1, [1]), types.SimpleNamespace(a=1), collections.deque([1, 2]),
    collections.deque([1, 2], 3), collections.OrderedDict(a=1), collections.defaultdict(list, a=1),
    collections.defaultdict(set, a=1), collections.Counter("ab"), collections.UserDict(a=1), np.float32(1),
    np.float64(1), np.arange(3), np.arange(3.0), np.arange(4).reshape(2, 2), np.arange(4), np.arange(4, dtype=">i8"),
    np.array(1), np.array("2020", "M8[D]"), np.array("2020", "M8[s]"), np.array(["a", "b"]), np.array(["a", 1],
    dtype=object), np.zeros((0, 2)), np.zeros((2, 0)), np.zeros(2, dtype=[("a", "i1"), ("b", "f8")]),
    np.ma.masked_array([1, 2], [0, 1]), np.ma.masked_array([1, 2], [1, 0]), np.dtype("f4"), torch.arange(3),
    torch.arange(3.0), torch.arange(3).view(3, 1), torch.tensor(1), torch.zeros(0, 2),
    torch.nn.Parameter(torch.arange(3.0)), torch.ones(2, dtype=torch.bfloat16), torch.eye(2).to_sparse(), torch.ones(2,
    dtype=torch.complex64), torch.float32, torch.device("cpu"), torch.Size([1]), tv_tensors.Image(torch.zeros(3, 2, 2)),
    tv_tensors.Mask(torch.zeros(3, 2, 2)), tv_tensors.BoundingBoxes(torch.ones(1, 4), format="XYXY", canvas_size=(3,
    4)), tv_tensors.BoundingBoxes(torch.ones(1, 4), format="XYWH", canvas_size=(3, 4)), PIL.Image.new("L", (2, 3)),
    PIL.Image.new("L", (3, 2)), PIL.Image.new("P", (2, 3)), PIL.Image.new("L", (2, 3), 7), len, abs, np.add, np.mean,
    torch.relu, torch.nn.functional.relu, str.upper, int, Colour, Record, list[int], functools.partial(int, base=2),
    functools.partial(int, base=3), Digits().__getitem__, Digits(5).__getitem__, torch.nn.ReLU(),
    torch.nn.ReLU(inplace=True), transforms.Resize(8), transforms.Resize(16), v2.Resize(8), logging.getLogger,
]  # fmt: skip


def test_different_values_have_different_keys() -> None:
    keys: dict[str, Any] = {}
    for value in VALUES:
        key = fingerprint(value)
        assert re.fullmatch("[0-9a-f]{32}", key)
        assert key not in keys, f"{value!r} and {keys[key]!r} have one key"
        keys[key] = value


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_a_pickled_copy_has_the_same_key(value: Any) -> None:
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        pytest.skip("NumPy's pickle changes the byte order")
    assert fingerprint(pickle.loads(pickle.dumps(value))) == fingerprint(value)


def test_equal_copies_count_like_one_shared_object() -> None:
    shared = [np.arange(3), {"a": (1, "b")}]
    assert fingerprint([shared, shared]) == fingerprint([shared, copy.deepcopy(shared)])
    assert fingerprint(Record("ab")) == fingerprint(Record("".join(["a", "b"])))
    noop = run("f = lambda x: x")["f"]
    assert fingerprint([noop, noop]) == fingerprint([noop, run("f = lambda x: x")["f"]])


def test_order_counts_in_dicts_but_not_in_sets_or_attributes() -> None:
    assert fingerprint({"a": 1, "b": 2}) != fingerprint({"b": 2, "a": 1})
    assert fingerprint({8, 0}) == fingerprint({0, 8}), "these two iterate in different orders"
    assert fingerprint({Record("a"), Record("b")}) == fingerprint({Record("b"), Record("a")})
    assert fingerprint(types.SimpleNamespace(a=1, b=2)) != fingerprint(types.SimpleNamespace(a=2, b=1))
    first, second = Digits(), Digits()
    second.__dict__ = dict(reversed(list(first.__dict__.items())))
    assert fingerprint(first) == fingerprint(second)


def test_cycles_have_keys() -> None:
    def ring(*names: str) -> Node:
        nodes = [Node(name) for name in names]
        for node, following in zip(nodes, nodes[1:] + nodes[:1], strict=True):
            node.others.append(following)
        return nodes[0]

    assert fingerprint(ring("a", "b", "c")) == fingerprint(ring("a", "b", "c"))
    assert len({fingerprint(ring(*names)) for names in ("a", "ab", "abc", "abd", "aa")}) == 5
    loop: list[Any] = [1]
    loop.append(loop)
    assert fingerprint(loop) != fingerprint([1, [1]])


def test_views_count_by_what_they_show() -> None:
    tensor = torch.arange(12).view(3, 4)
    assert fingerprint(tensor[:, 1]) == fingerprint(tensor[:, 1].clone())
    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous())
    pair = torch.tensor([1 + 2j, 3 - 1j])
    assert fingerprint(pair.conj()) == fingerprint(pair.conj().resolve_conj()) != fingerprint(pair)
    array = np.arange(12).reshape(3, 4)
    assert fingerprint(array[::-1, ::2]) == fingerprint(array[::-1, ::2].copy())
    assert fingerprint(np.asfortranarray(array)) == fingerprint(array)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_nested_and_quantized_tensors_count() -> None:
    dense = torch.eye(4)
    makers: list[Callable[[torch.Tensor], torch.Tensor]] = [
        torch.Tensor.to_sparse_coo, torch.Tensor.to_sparse_csr, torch.Tensor.to_sparse_csc,
        lambda tensor: tensor.to_sparse_bsr((2, 2)), lambda tensor: tensor.to_sparse_bsc((2, 2)),
        lambda tensor: torch.nested.nested_tensor([tensor, tensor[:2]]),
        lambda tensor: torch.nested.nested_tensor([tensor, tensor[:2]], layout=torch.jagged),
        lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
        lambda tensor: torch.quantize_per_tensor(tensor, 0.2, 0, torch.qint8),
    ]  # fmt: skip
    keys = [fingerprint(make(tensor)) for make in makers for tensor in (dense, dense * 2)]
    assert len(set(keys)) == len(keys)
    assert keys == [fingerprint(make(tensor)) for make in makers for tensor in (dense.clone(), dense * 2)]


def test_a_memory_map_counts_like_the_array_in_it(tmp_path: pathlib.Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(5))
    assert fingerprint(np.load(tmp_path / "a.npy", mmap_mode="r")) == fingerprint(np.arange(5))


def test_every_dtype_of_torch_counts_or_is_refused() -> None:
    keys = []
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        tensor = torch.zeros(16, dtype=torch.uint8)
        try:
            keys.append(fingerprint(tensor.view(dtype)))
        except (RuntimeError, NotImplementedError, FingerprintError):
            assert "q" in str(dtype) or "bits" in str(dtype), f"{dtype} cannot be identified"
    assert len(set(keys)) == len(keys) > 20


def test_an_image_counts_the_same_before_and_after_it_is_loaded(tmp_path: pathlib.Path) -> None:
    PIL.Image.new("RGB", (4, 4), "red").save(tmp_path / "a.png", dpi=(100, 100))
    lazy, loaded = PIL.Image.open(tmp_path / "a.png"), PIL.Image.open(tmp_path / "a.png")
    loaded.load()
    assert fingerprint(lazy) == fingerprint(loaded) == fingerprint(lazy)


BULK: dict[str, Callable[[int], Any]] = {
    "paths": lambda i: f"/data/{i}.jpg",
    "samples": lambda i: (f"/data/{i}.jpg", i % 7),
    "floats": lambda i: i / 3,
    "large": lambda i: 2**70 + i,
    "mixed": lambda i: (str(i), None if i % 2 else i, [i]),
    "records": lambda i: {"file": f"{i}.jpg", "boxes": [i, i + 1]},
    "ragged": lambda i: list(range(i % 5)),
    "nested": lambda i: ((i, str(i)), float(i)),
    "pathlib": lambda i: pathlib.Path(f"/data/{i}.jpg"),
    "arrays": lambda i: np.array([i, i + 1]),
    "tensors": lambda i: torch.tensor([i, i + 1]),
    "unequal": lambda i: torch.full((i % 3 + 1,), i),
    "dataclasses": lambda i: Record(str(i)),
}


@pytest.mark.parametrize("kind", BULK)
@pytest.mark.parametrize("n", [3, 1000])
def test_long_lists_count_to_the_last_element(kind: str, n: int) -> None:
    make = BULK[kind]
    values = [make(i) for i in range(n)]
    key = fingerprint(values)
    assert fingerprint([make(i) for i in range(n)]) == key
    assert fingerprint(pickle.loads(pickle.dumps(values))) == key
    for changed in (
        [*values[:-1], make(n + 8)], [make(n + 8), *values[1:]], values[:-1], [*values, make(n)], [values[1], values[0],
        *values[2:]], tuple(values), [*values[:-1], None],
    ):  # fmt: skip
        assert fingerprint(changed) != key


def test_the_split_between_strings_counts() -> None:
    for n in (2, 1000):
        assert fingerprint(["ab", "c"] * n) != fingerprint(["a", "bc"] * n)
        assert fingerprint([["ab"], []] * n) != fingerprint([[], ["ab"]] * n)


def test_a_buffer_counts_to_the_last_byte() -> None:
    for size in (10, 1 << 17, 9 << 20):
        data = torch.zeros(size, dtype=torch.uint8)
        key = fingerprint(data)
        assert fingerprint(data.clone()) == key
        for index in (0, size // 2, size - 1):
            changed = data.clone()
            changed[index] = 1
            assert fingerprint(changed) != key
        assert fingerprint(bytes(size)) != fingerprint(bytes(size + 1)) != fingerprint(bytearray(size + 1))


simple = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
nested = st.recursive(
    simple,
    lambda inner: (
        st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(nested, nested)
def test_keys_are_equal_exactly_when_contents_are(a: Any, b: Any) -> None:
    assert fingerprint(pickle.loads(pickle.dumps(a))) == fingerprint(a)
    assert (fingerprint(a) == fingerprint(b)) == (repr(a) == repr(b))


# Code


SCRIPT = '''
    import enum, functools
    import numpy as np

    K = 4
    TABLE = {"a": [1, 2]}

    def deep(x):
        return x * K

    def helper(x, *, y=3):
        """A docstring."""
        return deep(x) + y

    class Mode(enum.Enum):
        A = 1

        def factor(self):
            return 5

    class Base:
        scale = 6

        def shared(self, x):
            return x + 7

    class Data(Base):
        def __init__(self, offset=8):
            self.offset = offset
            self.apply = lambda x: x + 9 + offset
            self.mode = Mode.A

        @property
        def more(self):
            return 10

        @staticmethod
        def fixed(x):
            return x + 11

        @functools.lru_cache
        def cached(self, i):
            return 12

        def __len__(self):
            return 13

        def __getitem__(self, i):
            """Another docstring."""
            # a comment
            inner = [helper(q) + len(TABLE) for q in (1, 2.5, None) if q in {"s", "t"}]
            class Local:
                value = 14
            def nested(x=15):
                return x + 16
            try:
                return self.shared(i), f"{i:>3}", inner, np.abs(i), nested()
            except KeyError:
                return i < 17
'''
CHANGES = [
    ("K = 4", "K = 5"),
    ('{"a": [1, 2]}', '{"a": [1, 3]}'),
    ("x * K", "x / K"),
    ("y=3", "y=4"),
    ("A = 1", "A = 2"),
    ("return 5", "return 6"),
    ("scale = 6", "scale = 7"),
    ("x + 7", "x + 8"),
    ("offset=8", "offset=9"),
    ("x + 9", "x + 8"),
    ("9 + offset", "9 - offset"),
    ("return 10", "return 11"),
    ("x + 11", "x + 12"),
    ("return 12", "return 14"),
    ("return 13", "return 14"),
    ("2.5", "2.25"),
    ('{"s", "t"}', '{"s", "u"}'),
    ("value = 14", "value = 15"),
    ("x=15", "x=14"),
    ("x + 16", "x + 17"),
    (":>3", ":<3"),
    ("KeyError", "IndexError"),
    ("i < 17", "i > 17"),
    ("np.abs", "np.sign"),
    ("class Data(Base)", "class Data"),
    ("self.shared(i), ", ""),
    ("@staticmethod\n", "@classmethod\n"),
    ("@property", "@staticmethod"),
]


@pytest.mark.parametrize(("old", "new"), CHANGES, ids=[new for _, new in CHANGES])
def test_a_change_to_the_code_changes_the_key(old: str, new: str) -> None:
    assert SCRIPT.count(old) == 1
    assert fingerprint(run(SCRIPT.replace(old, new))["Data"]()) != fingerprint(run(SCRIPT)["Data"]())


def test_what_the_code_does_not_do_leaves_the_key_alone() -> None:
    key = fingerprint(run(SCRIPT)["Data"]())
    assert fingerprint(run("\n\n\n" + SCRIPT)["Data"]()) == key
    for old, new in (
        ("A docstring.", "Changed."), ("            # a comment\n", "\n\n"), ("x, *, y=3", "x: int, *, y: int = 3"),
        ('        """A docstring."""\n', ""), ("import enum", "import os, enum"), ("K = 4", "unused = 1\n    K = 4"),
    ):  # fmt: skip
        assert SCRIPT.count(old) == 1
        assert fingerprint(run(SCRIPT.replace(old, new))["Data"]()) == key, new
    assert fingerprint(run(SCRIPT, name="__mp_main__")["Data"]()) == key, "as a spawned worker names the main script"


def test_scripts_with_one_class_name_are_told_apart() -> None:
    script = "class DS:\n    def __getitem__(self, i): return i * {}\n"
    first, second = (run(script.format(factor))["DS"]() for factor in (2, 3))
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first) != fingerprint(run(script.format(2), name="another")["DS"]())


def test_functions_count_by_defaults_closures_and_attributes() -> None:
    def make(inner: Any, default: Any = 1) -> Any:
        def function(x: Any, y: Any = default) -> Any:
            return inner, x, y

        return function

    base = fingerprint(make(1))
    assert base == fingerprint(make(1))
    assert base != fingerprint(make(2)) != fingerprint(make(1, default=2)) != base
    assert fingerprint(make(lambda: 1)) != fingerprint(make(lambda: 2))
    marked = make(1)
    marked.scale = 2
    assert fingerprint(marked) != base


def test_recursive_and_mutually_recursive_functions_have_keys() -> None:
    script = "def f(n): return n and g(n - 1)\ndef g(n): return n and f(n - {})\n"
    assert fingerprint(run(script.format(1))["f"]) == fingerprint(run(script.format(1))["f"])
    assert fingerprint(run(script.format(1))["f"]) != fingerprint(run(script.format(2))["f"])


def test_many_functions_that_name_each_other_take_no_exponential_time() -> None:
    names = [f"f{i}" for i in range(40)]
    space = run("".join(f"def {name}(): return {', '.join(names)}\n" for name in names))
    assert fingerprint(space["f0"])


def test_decorated_functions_count_by_what_they_wrap() -> None:
    def decorated(decorator: Callable[..., Any], factor: int) -> Any:
        return run(f"@decorator\ndef f(x): return x * {factor}\n", decorator=decorator)["f"]

    def own(function: Any) -> Any:
        return functools.wraps(function)(lambda *args: function(*args))

    no_grad = torch.no_grad()
    for decorator in (no_grad, functools.lru_cache, functools.cache, own, staticmethod, functools.singledispatch):
        assert fingerprint(decorated(decorator, 2)) == fingerprint(decorated(decorator, 2))
        assert fingerprint(decorated(decorator, 2)) != fingerprint(decorated(decorator, 3))


USES = {
    "from followed_package import f": "f(x)",
    "import followed_package": "followed_package.f(x)",
    "import followed_package as h": "h.sub.g(x) + h.f(x)",
    "from followed_package import sub": "sub.g(x)",
    "": "__import__('sys') and late(x)",
}
LATE = """
def late(x):
    from followed_package import f
    return f(x)
"""


@pytest.mark.parametrize("imports", USES, ids=lambda imports: imports or "late import")
def test_the_users_modules_are_followed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, imports: str) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "followed_package"
    package.mkdir()

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "followed_package"]:
            del sys.modules[name]

    def key(constant: int, other: int = 0) -> str:
        forget()
        inside = f"K = {constant}\nOTHER = {other}\ndef g(x): return x * K\ndef unused(): return OTHER\n"
        (package / "sub.py").write_text(inside)
        (package / "__init__.py").write_text("from . import sub\ndef f(x): return sub.g(x)\n")
        for cached in package.glob("__pycache__/*"):
            cached.unlink()  # rewritten within a second, the source looks unchanged
        importlib.invalidate_caches()
        return fingerprint(run(f"{imports}\n{LATE}\nfunction = lambda x: {USES[imports]}")["function"])

    base = key(4)
    assert key(4) == base
    assert key(5) != base
    if imports:
        assert key(4, other=1) == base, "what is not used of a module does not count"
    forget()


def test_a_late_import_counts_the_same_once_it_has_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lazy_helper.py").write_text("import fractions\ndef f(x): return x\n")
    late = "def function(x):\n    from lazy_helper import f\n    import not_installed_anywhere\n    return f(x)"
    function = run(late)["function"]
    before = fingerprint(function)
    assert "lazy_helper" not in sys.modules
    importlib.import_module("lazy_helper")
    assert fingerprint(function) == before
    del sys.modules["lazy_helper"]


def test_a_module_held_as_an_attribute_counts_by_its_source(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    keys = []
    for i in (1, 2):
        (tmp_path / f"settings_{i}.py").write_text(f"SIZE = {i}\n")
        keys.append(fingerprint(types.SimpleNamespace(config=importlib.import_module(f"settings_{i}"))))
        del sys.modules[f"settings_{i}"]
    assert keys[0] != keys[1]
    assert fingerprint(np) != fingerprint(torch)


def test_installed_packages_count_by_name_and_version() -> None:
    parts = fingerprint(Digits(transform=v2.Compose([v2.ToDtype(torch.float32)])), explain=True).parts
    assert "ToDtype (torchvision " in parts["dataset.transform.transforms[0].__class__"]
    assert not any("make_params" in path for path in parts)


# Datasets, and their use


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: datasets.FakeData(4, transform=transforms.ToTensor()),
        lambda: Subset(Digits(10), [1, 3]),
        lambda: ConcatDataset([Digits(2), Digits(3)]),
        lambda: TensorDataset(torch.arange(4)),
        lambda: Digits(transform=transforms.Compose([transforms.Resize(8), transforms.Lambda(abs)])),
        lambda: Digits(transform=torch.nn.Sequential(torch.nn.Linear(1, 1, device="meta"))),
        lambda: Digits(transform=functools.partial(Digits().__getitem__)),
    ],
)
def test_datasets_have_stable_keys(dataset: Callable[[], Any]) -> None:
    assert fingerprint(dataset()) == fingerprint(dataset()) == fingerprint(pickle.loads(pickle.dumps(dataset())))


def test_datasets_differ_by_every_part() -> None:
    variants = [
        Digits(4), Digits(5), Subset(Digits(4), [0, 1]), Subset(Digits(4), [1, 0]), Subset(Digits(5), [0, 1]),
        ConcatDataset([Digits(4)]), Digits(transform=abs), Digits(transform=transforms.Resize(8)),
        Digits(transform=transforms.Compose([transforms.Resize(8), transforms.CenterCrop(4)])),
        Digits(transform=transforms.Compose([transforms.CenterCrop(4), transforms.Resize(8)])), [],
    ]  # fmt: skip
    assert len({fingerprint(variant) for variant in variants}) == len(variants)


USED = """
    import functools

    READS = 0

    def count():
        global READS
        READS += 1

    class Used:
        late = None

        def __init__(self, path):
            self.path, self.file = path, None
            self.calls = 0
            self.cache = {}

        def __len__(self):
            return 3

        @functools.lru_cache
        def slow(self, i):
            return i

        @functools.cached_property
        def header(self):
            return "header"

        def open(self):
            if self.file is None:
                self.file = open(self.path)
            if not hasattr(self, "other"):
                self.other = open(self.path)
            self.late = self.late or open(self.path)
            return self.file

        def __getitem__(self, i):
            self.calls += 1
            count()
            if i not in self.cache:
                self.cache[i] = self.slow(i), self.header, self.open().name
            return self.cache[i]
"""


def test_use_leaves_the_key_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a"
    path.write_text("content")
    used = run(USED)["Used"](str(path))
    before = fingerprint(used, explain=True)
    for i in (0, 1, 0):
        used[i]
    after = fingerprint(used, explain=True)
    used.file.close(), used.other.close(), used.late.close()
    assert after.key == before.key == fingerprint(used)
    for name in ("calls", "file", "other", "late", "header", "cache"):
        assert after.parts[f"dataset.{name}"].startswith("left out: "), name
    assert fingerprint(run(USED)["Used"]("another path")) != before.key


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.calls += 1", "pass"),  # nothing advances it, so it is a setting
        ("self.calls += 1", "self.calls = self.calls or 5"),
        ("self.calls = 0", "self.calls = len(path)"),
        ("def open(self):", "def set_calls(self, calls): self.calls = calls\n        def open(self):"),
        ("self.cache[i] =", "x ="),
        ("self.cache = {}", "self.cache = {}\n            self.cache[7] = 1"),
        ("self.cache = {}", "self.cache = {7: 1}"),
    ],
)
def test_settings_are_not_mistaken_for_counters_and_caches(old: str, new: str) -> None:
    def key(**changed: Any) -> str:
        used = run(USED.replace(old, new))["Used"]("path")
        vars(used).update(changed)
        return fingerprint(used)

    changed: dict[str, Any] = {"cache": {1: 2}} if "cache" in old else {"calls": 3}
    assert key(**changed) != key()


def test_the_class_says_what_its_state_is() -> None:
    class State(Digits):
        def __getstate__(self) -> Any:
            return {key: value for key, value in self.__dict__.items() if key != "handle"}

    class Chosen(Digits):
        def __fingerprint__(self) -> Any:
            return len(self), 1

    for cls in (State, Chosen):
        plain, used = cls(), cls()
        used.handle = lambda: iter([1])  # type: ignore[attr-defined]
        used.handle = iter([1])  # type: ignore[attr-defined]
        assert fingerprint(plain) == fingerprint(used) != fingerprint(cls(5))
    assert fingerprint(Chosen()) != fingerprint(Digits())


def test_explain_lists_what_went_in_and_what_did_not() -> None:
    dataset = Digits(transform=transforms.Compose([transforms.Resize(8), abs]))
    dataset.lock, dataset.log = threading.Lock(), logging.getLogger("x")  # type: ignore[attr-defined]
    first = fingerprint(dataset, explain=True)
    assert isinstance(first, Fingerprint)
    assert first.key == fingerprint(dataset)
    assert first.parts["dataset.lock"] == "left out: a lock"
    assert first.parts["dataset.log"] == "left out: a logger"
    assert first.parts["dataset.transform.transforms[0].size"] == "8"
    assert next(iter(first.parts)) == "dataset"
    dataset.transform.transforms[0].size = 16
    second = fingerprint(dataset, explain=True)
    differing = {path for path in first.parts if first.parts[path] != second.parts[path]}
    assert differing == {
        "dataset", "dataset.transform", "dataset.transform.transforms", "dataset.transform.transforms[0]",
        "dataset.transform.transforms[0].size",
    }  # fmt: skip
    assert str(first).splitlines()[0] == f"key {first.key}"
    assert "dataset.transform.transforms[0].size  8" in str(first).splitlines()
    assert pickle.loads(pickle.dumps(first)) == first


def test_explain_of_a_long_list_is_short() -> None:
    assert len(fingerprint([object() for _ in range(5000)], explain=True).parts) < 100


def test_left_out_objects_do_not_count() -> None:
    referred = Digits()
    for make in (
        threading.Lock, threading.RLock, threading.Event, threading.local, lambda: weakref.ref(referred),
        weakref.WeakKeyDictionary, lambda: logging.getLogger("a"), lambda: random.Random(), np.random.RandomState,
    ):  # fmt: skip
        assert fingerprint([make()]) == fingerprint([make()])


# What cannot be identified


def seeded_at_random() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


UNIDENTIFIABLE: dict[str, Callable[[], Any]] = {
    "file": lambda: open(os.devnull),  # noqa: SIM115
    "binary file": lambda: open(os.devnull, "rb"),  # noqa: SIM115
    "socket": socket.socket,
    "generator": lambda: (i for i in ()),
    "iterator": lambda: iter([1]),
    "map": lambda: map(len, []),
    "count": itertools.count,
    "unseeded NumPy": np.random.default_rng,
    "unseeded PCG64": np.random.PCG64,
    "unseeded torch": seeded_at_random,
    "frame": sys._getframe,
}


@pytest.mark.parametrize("kind", UNIDENTIFIABLE)
def test_what_cannot_be_identified_is_named(kind: str) -> None:
    value = UNIDENTIFIABLE[kind]()
    with contextlib.closing(value) if hasattr(value, "close") else contextlib.nullcontext():
        step = transforms.Lambda(abs)
        step.f = value
        dataset = Digits(transform=transforms.Compose([transforms.Resize(8), step]))
        with pytest.raises(FingerprintError, match=r"^dataset\.transform\.transforms\[1\]\.f \(.*key=") as caught:
            fingerprint(dataset)
        assert type(value).__name__ in str(caught.value)
        assert str(FingerprintError(str(caught.value))) == str(caught.value)


def test_the_place_of_what_cannot_be_identified_is_found_in_code(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "a", "w") as handle:
        for source, place in (
            ("class D:\n    def __len__(self): return handle", r"dataset\.__class__\.__len__\.__globals__\['handle'\]"),
            ("D = lambda: (lambda inner: lambda: inner)(handle)", r"dataset\.__closure__\['inner'\]"),
            ("class D:\n    attribute = handle", r"dataset\.__class__\.attribute"),
            ("D = lambda: {'a': [1, (handle,)]}", r"dataset\['a'\]\[1\]\[0\]"),
            ("import functools\nD = lambda: functools.partial(print, file=handle)", r"dataset\.keywords\['file'\]"),
        ):
            with pytest.raises(FingerprintError, match=place):
                fingerprint(run(source, handle=handle)["D"]())


def test_too_deep_a_nesting_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(FingerprintError, match="nested too deeply"):
        fingerprint(deep)


def test_in_memory_streams_count_by_content() -> None:
    read = io.BytesIO(b"abc")
    read.read()
    assert fingerprint(read) == fingerprint(io.BytesIO(b"abc")) != fingerprint(io.BytesIO(b"abd"))


def test_seeded_generators_count_by_their_seed() -> None:
    drawn, fresh = np.random.default_rng(3), np.random.default_rng(3)
    drawn.random()
    assert fingerprint(drawn) == fingerprint(fresh) == fingerprint(pickle.loads(pickle.dumps(drawn)))
    child = np.random.Generator(np.random.PCG64(np.random.SeedSequence(3).spawn(1)[0]))
    twister = np.random.Generator(np.random.MT19937(3))
    seeded = [fresh, np.random.default_rng(4), np.random.default_rng([3, 4]), child, twister]
    assert len({fingerprint(generator) for generator in seeded}) == len(seeded)
    drawn, fresh = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    torch.rand(3, generator=drawn)
    assert fingerprint(drawn) == fingerprint(fresh) != fingerprint(torch.Generator().manual_seed(4))
    assert fingerprint(torch.Generator()) == fingerprint(torch.Generator()), "it has a fixed seed unless given another"


# Across processes


PROGRAM = """
    import numpy as np, torch
    from torchcache.fingerprint import fingerprint

    WORDS = {"alpha", "beta", "gamma", "delta"}

    def helper(x):
        return x in {"one", "two", "three", "four"} or x * %s

    class Data:
        kinds = frozenset(["x", "y", "z"])

        def __init__(self):
            self.calls = 0
            self.words = set(WORDS) | {None, 1, ("a", 2)}
            self.table = {word: np.arange(3) for word in sorted(WORDS)}
            self.transform = [torch.nn.ReLU(), lambda x: helper(x) or WORDS]
            self.generator = np.random.default_rng(0)

        def __getitem__(self, i):
            self.calls += 1
            return helper(i)

    data = Data()
    before = fingerprint(data)
    data[3]
    assert fingerprint(data) == before
    print(before)
"""


def test_the_key_is_the_same_in_every_process(tmp_path: pathlib.Path) -> None:
    running = []
    for seed, factor, margin in (("0", 2, ""), ("1", 2, "\n\n")):
        script = tmp_path / seed / f"script{seed}.py"
        script.parent.mkdir()
        script.write_text(margin + textwrap.dedent(PROGRAM) % factor)
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        running.append(subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment, text=True))
    keys = [process.communicate(timeout=50)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert keys[0] == keys[1] == run(PROGRAM % 2)["before"] != run(PROGRAM % 3)["before"]
