"""Randomness: draws are noticed wherever they come from, and pipelines are cut before them."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import random
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchcache.errors import RandomSampleError, RandomSampleWarning
from torchcache.guard import EVERY_SAMPLES, FIRST_SAMPLES, RandomnessGuard
from torchcache.split import split_transform

GLOBAL_GENERATOR = np.random.default_rng(0)
CLIENT = {"delay": random.random}


class Source(Dataset[Any]):
    def __init__(self, transform: Callable[[Any], Any] | None = None, **attributes: Any) -> None:
        self.transform = transform
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return self.transform(index) if self.transform else index


class Jitter:
    def __call__(self, x: Any) -> Any:
        return x + torch.rand(())


class Double:
    def __call__(self, x: Any) -> Any:
        return x * 2


class Held:
    """A transform that draws from a generator of its own."""

    def __init__(self, generator: Any, draw: Callable[[Any], Any]) -> None:
        self.generator, self.draw = generator, draw

    def __call__(self, x: Any) -> Any:
        return x, self.draw(self.generator)


class Slots:
    __slots__ = ("generator",)

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, x: Any) -> Any:
        return x, self.generator.random()


def noise(x: Any) -> Any:
    return x + np.random.normal()


def noise_by_global(x: Any) -> Any:
    return x + GLOBAL_GENERATOR.random()


def noise_by_helper(x: Any) -> Any:
    return noise(x)


def keyed_noise(x: Any, generator: Any = None) -> Any:
    return x + generator.random()


def produce(guard: RandomnessGuard, source: Source, index: int = 0) -> Any:
    with guard.watch(source):
        return source[index]


def states() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().numpy().tobytes()


@pytest.fixture(autouse=True)
def _own_randomness() -> Iterator[None]:
    """Leaves the global generators as they were."""
    python, legacy, default = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(legacy)
    torch.set_rng_state(default)


# What is noticed


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda x: random.random(), "Python's random module"),
        (lambda x: random.shuffle([1, 2, 3]), "Python's random module"),
        (lambda x: np.random.rand(), "NumPy's global generator"),
        (lambda x: np.random.permutation(3), "NumPy's global generator"),
        (lambda x: torch.rand(1), "torch's default generator"),
        (lambda x: torch.nn.functional.dropout(torch.ones(3)), "torch's default generator"),
        (v1.RandomApply([], p=0.5), "torch's default generator"),
    ],
)
def test_draws_from_the_global_generators_are_named(draw: Callable[[Any], Any], name: str) -> None:
    with pytest.raises(RandomSampleError, match=f"drew random numbers from {name}") as caught:
        produce(RandomnessGuard("error"), Source(draw))
    message = str(caught.value)
    assert "transform=" in message
    assert 'on_random="allow"' in message
    assert str(RandomSampleError(message)) == message


def test_the_second_gaussian_of_a_pair_is_noticed_too() -> None:
    np.random.standard_normal()  # NumPy's legacy generator makes two at a time, and now holds the other
    with pytest.raises(RandomSampleError, match="NumPy's global generator"):
        produce(RandomnessGuard("error"), Source(lambda x: np.random.standard_normal()))


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default_rng": (lambda: np.random.default_rng(0), lambda generator: generator.random()),
    "MT19937": (lambda: np.random.Generator(np.random.MT19937(0)), lambda generator: generator.integers(5)),
    "Philox": (lambda: np.random.Generator(np.random.Philox(0)), lambda generator: generator.random()),
    "RandomState": (lambda: np.random.RandomState(0), lambda generator: generator.rand()),
    "torch": (lambda: torch.Generator(), lambda generator: torch.rand(1, generator=generator)),
    "random": (lambda: random.Random(0), lambda generator: generator.random()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_held_by_a_transform_are_named_by_their_attribute(kind: str) -> None:
    make, draw = GENERATORS[kind]
    step = Held(make(), draw)
    where = r"from dataset\.transform\.transforms\[1\]\.generator\."
    with pytest.raises(RandomSampleError, match=where):
        produce(RandomnessGuard("error"), Source(v1.Compose([Double(), step])))
    assert produce(RandomnessGuard("error"), Source(Double(), step=step, other=make())) == 0, "held, but not drawn from"


@pytest.mark.parametrize(
    ("transform", "where"),
    [
        (lambda: Slots(np.random.default_rng(0)), "dataset.transform.generator"),
        (lambda: functools.partial(keyed_noise, generator=np.random.default_rng(0)), "dataset.transform.keywords"),
        (lambda: np.random.default_rng(0).standard_normal, "dataset.transform.__self__"),
        (lambda: (lambda inner: lambda x: inner.random())(np.random.default_rng(0)), "inner in"),
        (lambda: noise_by_global, "the global GLOBAL_GENERATOR"),
        (lambda: torch.nn.Sequential(Module(np.random.default_rng(0))), "_modules['0'].generator"),
        (lambda: {"a": [Held(np.random.default_rng(0), lambda g: g.random())]}["a"][0].__call__, "__self__.generator"),
    ],
)
def test_generators_are_found_wherever_they_are_held(transform: Callable[[], Any], where: str) -> None:
    with pytest.raises(RandomSampleError) as caught:
        produce(RandomnessGuard("error"), Source(transform()), 1)
    assert where in str(caught.value)


class Module(torch.nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Any) -> Any:
        return x + self.generator.random()


def test_what_probably_drew_is_named() -> None:
    for transform, where in (
        (v1.Compose([Double(), v1.RandomApply([Double()])]), "dataset.transform.transforms[1] (RandomApply)"),
        (v1.Compose([Double(), Jitter()]), "dataset.transform.transforms[1] (Jitter), which names rand"),
        (noise_by_helper, "noise (noise), which names normal"),
    ):
        with pytest.raises(RandomSampleError) as caught:
            produce(RandomnessGuard("error"), Source(transform))
        assert where in str(caught.value)


def test_a_draw_that_nothing_explains_takes_two_samples_in_a_row() -> None:
    drawn: list[int] = []

    def read(index: int) -> int:
        if index in drawn:
            CLIENT["delay"]()  # as a storage client does before it tries again
        return index

    guard, source = RandomnessGuard("error"), Source(read)
    drawn[:] = [0, 2, 4]
    assert [produce(guard, source, i) for i in range(8)] == list(range(8))
    drawn[:] = [8, 9]
    produce(guard, source, 8)
    with pytest.raises(RandomSampleError, match="Python's random module"):
        produce(guard, source, 9)


def test_a_deterministic_source_is_left_alone() -> None:
    guard, source = RandomnessGuard("error"), Source(v1.Compose([Double(), Double()]))
    assert [produce(guard, source, i) for i in range(100)] == [4 * i for i in range(100)]


def test_a_transform_set_later_is_watched_too() -> None:
    guard, source = RandomnessGuard("error"), Source()
    produce(guard, source)
    source.transform = Held(np.random.default_rng(0), lambda generator: generator.random())
    with pytest.raises(RandomSampleError, match=r"dataset\.transform\.generator"):
        produce(guard, source)


def test_the_guard_moves_no_generator() -> None:
    held = {kind: make() for kind, (make, _) in GENERATORS.items()}
    source = Source(Double(), **held)
    before = states(), pickle.dumps([held[kind] for kind in sorted(held) if kind != "torch"])
    guard = RandomnessGuard("warn")
    for i in range(FIRST_SAMPLES + 2):
        produce(guard, source, i)
    assert (states(), pickle.dumps([held[kind] for kind in sorted(held) if kind != "torch"])) == before


def test_draws_are_those_of_the_bare_source() -> None:
    torch.manual_seed(0)
    bare = [Source(Jitter())[i].item() for i in range(30)]
    torch.manual_seed(0)
    guard = RandomnessGuard("warn")
    with pytest.warns(RandomSampleWarning):
        watched = [produce(guard, Source(Jitter()), i).item() for i in range(30)]
    assert watched == bare


# Policies


def test_warn_warns_once() -> None:
    guard = RandomnessGuard("warn")
    with pytest.warns(RandomSampleWarning, match="torch's default generator") as caught:
        list(map(functools.partial(produce, guard, Source(Jitter())), range(50)))
    assert len(caught) == 1
    assert not any(guard.due() for _ in range(3000)), "there is nothing more to say"


def test_allow_does_not_look() -> None:
    guard = RandomnessGuard("allow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(50):
            produce(guard, Source(Jitter()), i)
    assert not any(guard.due() for _ in range(3000))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="on_random"):
        RandomnessGuard("never")  # type: ignore[arg-type]


def test_an_error_of_the_source_passes_through() -> None:
    def fails(x: Any) -> Any:
        torch.rand(1)
        raise KeyError("source")

    with pytest.raises(KeyError, match="source"):
        produce(RandomnessGuard("error"), Source(fails))


# When it looks


def test_it_looks_at_the_first_samples_and_then_now_and_then() -> None:
    guard = RandomnessGuard("error")
    due = [i for i in range(3 * EVERY_SAMPLES) if guard.due()]
    assert due[:FIRST_SAMPLES] == list(range(FIRST_SAMPLES))
    gaps = np.diff(due[FIRST_SAMPLES - 1 :])
    assert len(gaps) == 2
    assert all(abs(gap - EVERY_SAMPLES) <= 1 for gap in gaps)


def test_batches_count_by_their_samples() -> None:
    guard = RandomnessGuard("error")
    due = [64 * i for i in range(100) if guard.due(64)]
    assert due[0] == 0
    assert len(due) == 1 + 6
    assert all(EVERY_SAMPLES <= gap <= EVERY_SAMPLES + 64 for gap in np.diff(due))


def test_a_pickled_guard_keeps_its_settings_and_starts_anew() -> None:
    guard = RandomnessGuard("warn")
    for _ in range(100):
        guard.due()
    copy = pickle.loads(pickle.dumps(guard))
    assert copy.policy == "warn"
    assert copy.due()
    assert not guard.due()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_starts_anew() -> None:
    guard = RandomnessGuard("error")
    for _ in range(100):
        guard.due()
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(sending, b"due" if guard.due() else b"not")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(receiving, 3) == b"due"
    assert not guard.due()
    os.close(receiving), os.close(sending)


class Watched(Dataset[Any]):
    def __init__(self, source: Source) -> None:
        self.source, self.guard = source, RandomnessGuard("error")

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return produce(self.guard, self.source, index)


def test_the_error_reaches_the_main_process_from_a_worker() -> None:
    with pytest.raises(RandomSampleError, match="torch's default generator"):
        list(DataLoader(Watched(Source(Jitter())), batch_size=4, num_workers=1))
    assert len(list(DataLoader(Watched(Source(Double())), batch_size=4, num_workers=1))) == 25


# Threads


def test_another_threads_draws_are_not_blamed_on_the_source() -> None:
    stop = threading.Event()

    def draw() -> None:
        while not stop.wait(0.0005):
            torch.rand(1), random.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(5):
            produce(RandomnessGuard("error"), Source(lambda x: time.perf_counter() + sum(range(100_000))))
    finally:
        stop.set()
        thread.join()


def test_draws_are_noticed_beside_threads_that_rest_and_in_threads_of_the_source() -> None:
    def draw_in_a_thread(x: Any) -> Any:
        thread = threading.Thread(target=random.random)
        thread.start()
        thread.join()

    stop = threading.Event()
    resting = threading.Thread(target=stop.wait)
    resting.start()
    try:
        for transform in (Jitter(), draw_in_a_thread):
            with pytest.raises(RandomSampleError):
                produce(RandomnessGuard("error"), Source(transform))
    finally:
        stop.set()
        resting.join()


# split_transform


def names(pipeline: Any) -> list[str] | None:
    if pipeline is None:
        return None
    steps = list(pipeline) if isinstance(pipeline, torch.nn.Sequential) else getattr(pipeline, "transforms", [pipeline])
    return [
        str(names(step)) if isinstance(step, (v1.Compose, v2.Compose, torch.nn.Sequential)) else type(step).__name__
        for step in steps
    ]


CROP, FLIP = v1.CenterCrop(4), v1.RandomHorizontalFlip()


@pytest.mark.parametrize("compose", [v1.Compose, v2.Compose, lambda steps: torch.nn.Sequential(*steps)])
def test_a_pipeline_is_cut_at_its_first_random_step(compose: Callable[[list[Any]], Any]) -> None:
    crop, flip = ("CenterCrop", "RandomHorizontalFlip")
    for steps, first, rest in (
        ([CROP, FLIP, CROP], [crop], [flip, crop]),
        ([CROP, CROP], [crop, crop], None),
        ([FLIP, CROP], None, [flip, crop]),
        ([CROP, compose([CROP, FLIP, CROP]), CROP], [crop, f"['{crop}']"], [f"['{flip}', '{crop}']", crop]),
        ([compose([compose([CROP, FLIP])])], [f"[\"['{crop}']\"]"], [f"[\"['{flip}']\"]"]),
        ([CROP, v1.RandomApply([CROP]), CROP], [crop], ["RandomApply", crop]),
    ):
        pipeline = compose(steps)
        fixed, drawn = split_transform(pipeline)
        assert (names(fixed), names(drawn)) == (first, rest)
        assert all(part is None or type(part) is type(pipeline) for part in (fixed, drawn))


def test_the_pipeline_itself_is_not_changed() -> None:
    inner = v2.Compose([CROP, FLIP])
    pipeline = v2.Compose([inner, CROP])
    split_transform(pipeline)
    assert pipeline.transforms == [inner, CROP]
    assert inner.transforms == [CROP, FLIP]
    sequence = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout()).requires_grad_(False)
    first, rest = split_transform(sequence)
    assert len(sequence) == 2
    assert first[0] is sequence[0]
    assert rest[0] is sequence[1]


def test_single_steps_go_to_one_side() -> None:
    assert split_transform(None) == (None, None)
    assert split_transform(CROP) == (CROP, None)
    assert split_transform(FLIP) == (None, FLIP)
    assert split_transform(abs) == (abs, None)
    whole = v1.Compose([CROP])
    assert split_transform(whole) == (whole, None)


class Logged(v1.Compose):
    def __call__(self, image: Any) -> Any:
        return super().__call__(image), "logged"


class Reordered(v1.Compose):
    pass


def test_a_compose_that_does_more_is_not_taken_apart() -> None:
    logged = Logged([CROP, FLIP])
    assert split_transform(logged) == (None, logged)
    first, rest = split_transform(Reordered([CROP, FLIP]))
    assert type(first) is type(rest) is Reordered


@pytest.mark.parametrize(
    ("step", "is_random"),
    [
        (Double(), False),
        (Jitter(), True),
        (noise, True),
        (np.random.permutation, True),
        (torch.rand_like, True),
        (torch.relu, False),
        (noise_by_helper, True),
        (noise_by_global, True),
        (lambda x: x + 1, False),
        (lambda x: random.choice([x, -x]), True),
        (v1.Lambda(lambda x: x + 1), False),
        (v1.Lambda(lambda x: torch.randn(()) + x), True),
        (v2.Lambda(noise), True),
        (functools.partial(noise), True),
        (functools.partial(keyed_noise, generator=np.random.default_rng(0)), True),
        (Jitter().__call__, True),
        (Held(np.random.default_rng(0), str), True),
        (torch.nn.Dropout(), True),
        (torch.nn.Dropout().eval(), False),
        (torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()), False),
        (types.SimpleNamespace(), False),
        (v1.Normalize((0.5,), (0.5,)), False),
    ],
)
def test_a_users_step_is_random_if_something_tells_so(step: Any, is_random: bool) -> None:
    first, rest = split_transform(v1.Compose([CROP, step]))
    assert names(first) == (["CenterCrop"] if is_random else ["CenterCrop", *(names(v1.Compose([step])) or [])])
    assert (rest is not None) == is_random


class Sized(v2.Transform):
    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return inpt


class Drawn(Sized):
    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {"seed": os.getpid()}


def test_a_users_v2_transform_is_random_if_it_makes_parameters() -> None:
    assert split_transform(Sized())[1] is None
    assert split_transform(Drawn())[0] is None


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "CenterCrop": (8,),
    "Compose": ([v1.CenterCrop(8)],),
    "ConvertBoundingBoxFormat": ("XYWH",),
    "ConvertImageDtype": (torch.float32,),
    "FiveCrop": (8,),
    "GaussianBlur": (3,),
    "JPEG": ((5, 50),),
    "Lambda": (lambda x: x,),
    "LinearTransformation": (torch.eye(3 * 64 * 64), torch.zeros(3 * 64 * 64)),
    "Normalize": ((0.5,) * 3, (0.5,) * 3),
    "Pad": (1,),
    "RandomAdjustSharpness": (2,),
    "RandomAffine": (10,),
    "RandomApply": ([v1.CenterCrop(8)],),
    "RandomChoice": ([v1.CenterCrop(8), v1.CenterCrop(9)],),
    "RandomCrop": (8,),
    "RandomOrder": ([v1.CenterCrop(8), v1.CenterCrop(9)],),
    "RandomPosterize": (2,),
    "RandomResize": (8, 16),
    "RandomResizedCrop": (8,),
    "RandomRotation": (10,),
    "RandomShortestSize": ([8, 9],),
    "RandomSolarize": (0.5,),
    "Resize": (8,),
    "ScaleJitter": ((8, 8),),
    "SetClampingMode": ("soft",),
    "TenCrop": (8,),
    "ToDtype": (torch.float32,),
    "UniformTemporalSubsample": (2,),
}
KEYWORDS: dict[str, dict[str, Any]] = {"MixUp": {"num_classes": 3}, "CutMix": {"num_classes": 3}}
EVERY_TRANSFORM = [
    (module, name)
    for module in (v1, v2)
    for name, value in sorted(vars(module).items())
    if inspect.isclass(value) and callable(getattr(value, "__call__", None)) and name != "Transform"  # noqa: B004
    if name not in ("InterpolationMode", "AutoAugmentPolicy")
]


def inputs() -> Iterator[Any]:
    image = torch.randint(0, 255, (3, 64, 64), dtype=torch.uint8)
    yield image
    yield image / 255
    yield PIL.Image.fromarray(image.permute(1, 2, 0).numpy())
    yield image.permute(1, 2, 0).numpy()
    yield {
        "image": tv_tensors.Image(image),
        "boxes": tv_tensors.BoundingBoxes([[5, 5, 20, 20]], format="XYXY", canvas_size=(64, 64)),
        "points": tv_tensors.KeyPoints([[5, 5]], canvas_size=(64, 64)),
        "labels": torch.ones(1, dtype=torch.int64),
    }
    yield image[None].float(), torch.ones(1, dtype=torch.int64)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("module", "name"), EVERY_TRANSFORM, ids=[f"{m.__name__[12:]}.{n}" for m, n in EVERY_TRANSFORM]
)
def test_every_transform_of_torchvision_is_on_the_right_side(module: Any, name: str) -> None:
    step = getattr(module, name)(*ARGUMENTS.get(name, ()), **KEYWORDS.get(name, {}))
    ran, drew = False, False
    for sample in inputs():
        before = states()
        try:
            step(sample)
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
            continue  # not the kind of sample that it takes
        ran, drew = True, drew or states() != before
    assert ran, "give it arguments or a sample that it takes"
    first, rest = split_transform(step)
    assert (first is None, rest is None) == (drew, not drew)


def test_both_parts_together_are_the_pipeline() -> None:
    image = torch.randint(0, 255, (3, 40, 40), dtype=torch.uint8)
    random_steps = [v2.RandomCrop(16), v2.Compose([v2.RandomHorizontalFlip(), v2.ColorJitter(0.5)])]
    for compose, steps in (
        (v1.Compose, [v1.CenterCrop(32)]),
        (v2.Compose, [v2.CenterCrop(32), v2.Compose([v2.Pad(2)])]),
    ):
        pipeline = compose([*steps, *random_steps, v2.ToDtype(torch.float32)])
        first, rest = split_transform(pipeline)
        guard = RandomnessGuard("error")
        with guard.watch(first):
            fixed = first(image)
        for seed in range(5):
            torch.manual_seed(seed)
            expected = pipeline(image)
            torch.manual_seed(seed)
            assert torch.equal(rest(fixed), expected)
