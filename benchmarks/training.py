"""A training with and without the cache: what LeNet and ResNet share."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from common import clock, length, non_negative, positive, seed_everything, table
from plots import add_plot_option
from torch import nn
from torch.utils.data import DataLoader, Dataset

EVALUATION_BATCH = 256  # no gradients, so more fits; the same in every run
WARM_UP_STEPS = 10


def add_training_options(parser: argparse.ArgumentParser, *, epochs: int, batch_size: int) -> None:
    """The options of a benchmark that trains a model."""
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--cache", action="store_true", help="read through CachedDataset (default: without a cache)")
    mode.add_argument("--compare", action="store_true", help="both, in turns, from an empty cache")
    parser.add_argument("--epochs", type=positive, default=epochs, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch-size", type=positive, default=batch_size, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=non_negative, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: %(default)s")
    add_plot_option(parser, "epoch times")


def select_device(name: str) -> torch.device:
    """The device that ``--device`` names; ``auto`` is CUDA where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


class Waiting:
    """Iterates over a loader and adds up the seconds spent inside it: its start, and every ``next``."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.seconds = loader, 0.0

    def __iter__(self) -> Iterator[Any]:
        start = clock()
        iterator = iter(self.loader)
        self.seconds += clock() - start
        while True:
            start = clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.seconds += clock() - start
            yield batch


@dataclass(frozen=True)
class Recipe:
    """All that decides what a training computes, apart from where its samples come from.

    ``prepare`` gets the inputs when they are on the device (a normalisation, say). ``amp``: mixed precision, float16
    with a scaled loss on CUDA, bfloat16 on the CPU.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch_size: int
    workers: int
    device: torch.device
    seed: int
    prepare: Callable[[torch.Tensor], torch.Tensor] = lambda inputs: inputs
    amp: bool = False


@dataclass(frozen=True)
class Epoch:
    """What one epoch took, and what it computed. ``losses`` holds the exact float32 loss of every step."""

    train_s: float
    train_wait_s: float
    test_s: float
    test_wait_s: float
    images: int
    accuracy: float
    losses: list[float]


class Training:
    """A training by a recipe, over sets that ``open_sets`` returns: (training set, test set).

    Every epoch starts from seeds of its own, so that several trainings can take turns in one process and each computes
    what it would compute alone. ``store_s`` is what opening and closing the sets took.
    """

    def __init__(self, recipe: Recipe, open_sets: Callable[[], tuple[Dataset[Any], Dataset[Any]]]) -> None:
        self.recipe, self.epochs = recipe, list[Epoch]()
        start = clock()
        self.sets = open_sets()
        self.store_s = clock() - start
        seed_everything(recipe.seed)
        self.model = recipe.model().to(recipe.device)
        self.optimizer = recipe.optimizer(self.model)
        on_cuda = recipe.device.type == "cuda"
        self.precision = torch.autocast(
            recipe.device.type, torch.float16 if on_cuda else torch.bfloat16, enabled=recipe.amp
        )
        self.scaler = torch.amp.GradScaler(recipe.device.type, enabled=recipe.amp and on_cuda)
        self.train_loader = self._loader(self.sets[0], recipe.batch_size, shuffle=True)
        self.test_loader = self._loader(self.sets[1], EVALUATION_BATCH, shuffle=False)

    def _loader(self, dataset: Dataset[Any], batch_size: int, *, shuffle: bool) -> DataLoader[Any]:
        recipe = self.recipe
        return DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=recipe.workers,
            persistent_workers=recipe.workers > 0,
            pin_memory=recipe.device.type == "cuda",
            generator=torch.Generator(),
        )

    def _reseed(self, seed: int) -> None:
        seed_everything(seed)
        for loader in (self.train_loader, self.test_loader):
            loader.generator.manual_seed(seed)

    def _now(self) -> float:
        """The time when the device has done all it was given: kernels run on after the call that starts them."""
        if self.recipe.device.type == "cuda":
            torch.cuda.synchronize(self.recipe.device)
        return clock()

    def _to_device(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # Pinned memory lets the copies run beside the computation; one stream orders them before their use.
        inputs, targets = (part.to(self.recipe.device, non_blocking=True) for part in batch)
        return self.recipe.prepare(inputs), targets

    def _train(self, steps: int | None = None) -> tuple[int, float, list[float]]:
        """Images, seconds of waiting and losses. Losses stay on the device until the end: reading one waits for it."""
        self.model.train()
        waiting, losses, images = Waiting(self.train_loader), list[torch.Tensor](), 0
        for batch in waiting:
            inputs, targets = self._to_device(batch)
            self.optimizer.zero_grad(set_to_none=True)
            with self.precision:
                loss = nn.functional.cross_entropy(self.model(inputs), targets)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            losses.append(loss.detach())
            images += len(targets)
            if len(losses) == steps:
                break
        return images, waiting.seconds, torch.stack(losses).float().cpu().tolist()

    @torch.no_grad()
    def _test(self) -> tuple[float, float]:
        """Accuracy and seconds of waiting."""
        self.model.eval()
        waiting = Waiting(self.test_loader)
        right = torch.zeros((), dtype=torch.int64, device=self.recipe.device)
        for batch in waiting:
            inputs, targets = self._to_device(batch)
            with self.precision:
                right += (self.model(inputs).argmax(1) == targets).sum()
        return right.item() / length(self.sets[1]), waiting.seconds

    def run_epoch(self) -> Epoch:
        """Trains for an epoch, then tests."""
        self._reseed(self.recipe.seed + len(self.epochs))
        start = self._now()
        images, train_wait_s, losses = self._train()
        middle = self._now()
        accuracy, test_wait_s = self._test()
        end = self._now()
        epoch = Epoch(middle - start, train_wait_s, end - middle, test_wait_s, images, accuracy, losses)
        self.epochs.append(epoch)
        return epoch

    def warm_up(self) -> None:
        """A few steps for a model that is thrown away: kernels, thread pools and the CUDA context are set up once."""
        self._train(WARM_UP_STEPS)

    def close(self) -> None:
        """Ends the workers and closes the sets that can be closed."""
        del self.train_loader, self.test_loader
        start = clock()
        for dataset in self.sets:
            getattr(dataset, "close", lambda: None)()
        self.store_s += clock() - start

    def total(self, *fields: str, first: int = 0, last: int | None = None) -> float:
        """The sum of some fields over the epochs."""
        return float(sum(getattr(epoch, field) for epoch in self.epochs[first:last] for field in fields))

    def total_s(self) -> float:
        """Everything the user waits for: training, testing, opening and closing the sets."""
        return self.total("train_s", "test_s") + self.store_s


def run_in_turns(trainings: Mapping[str, Training], epochs: int) -> None:
    """Runs the epochs of several trainings in turns; every other epoch in the opposite order."""
    names = list(trainings)
    for number in range(epochs):
        for name in names if number % 2 == 0 else reversed(names):
            gc.collect()
            epoch = trainings[name].run_epoch()
            print(f"epoch {number + 1} of {epochs}, {name}: {epoch.train_s + epoch.test_s:.1f} s", file=sys.stderr)


def first_different_step(one: Training, other: Training) -> int | None:
    """The first step at which two trainings' losses differ in any bit, counted from 1; None where there is none."""
    bits = [np.array([loss for epoch in run.epochs for loss in epoch.losses], np.float32) for run in (one, other)]
    if len(bits[0]) != len(bits[1]):
        return min(len(bits[0]), len(bits[1])) + 1
    different = np.flatnonzero(bits[0].view(np.uint32) != bits[1].view(np.uint32))
    return int(different[0]) + 1 if len(different) else None


def comparison(cached: Training, uncached: Training) -> dict[str, Any]:
    """The ratios cached/uncached of one run, and whether both computed the same."""

    def ratio(*fields: str, first: int = 0, last: int | None = None) -> float | None:
        below = uncached.total(*fields, first=first, last=last)
        return cached.total(*fields, first=first, last=last) / below if below else None

    return {
        "total": cached.total_s() / uncached.total_s(),
        "first_epoch": ratio("train_s", "test_s", last=1),
        "later_epochs": ratio("train_s", "test_s", first=1),
        "waiting": ratio("train_wait_s", "test_wait_s"),
        "waiting_later_epochs": ratio("train_wait_s", "test_wait_s", first=1),
        "steps": sum(len(epoch.losses) for epoch in cached.epochs),
        "first_different_step": first_different_step(cached, uncached),
    }


def epoch_table(trainings: Mapping[str, Training]) -> str:
    """A row an epoch and training, and the totals."""
    header = ["epoch", "data", "seconds", "of it waiting", "images/s", "test seconds", "of it waiting", "accuracy"]
    rows, most = [], max(len(run.epochs) for run in trainings.values())
    for number in range(most):
        for name, run in trainings.items():
            e = run.epochs[number]
            times = [f"{e.train_s:.2f}", f"{e.train_wait_s:.2f}", f"{e.images / e.train_s:,.0f}"]
            rows.append([str(number + 1), name, *times, f"{e.test_s:.2f}", f"{e.test_wait_s:.2f}", f"{e.accuracy:.2%}"])
    for name, run in trainings.items():
        train_s, wait_s = run.total("train_s"), run.total("train_wait_s")
        times = [f"{train_s:.2f}", f"{wait_s:.2f}", f"{run.total('images') / train_s:,.0f}"]
        rows.append(["all", name, *times, f"{run.total('test_s'):.2f}", f"{run.total('test_wait_s'):.2f}", ""])
    return table(header, rows)
