"""Pictures of what the benchmarks measure. Only ``--plot`` needs matplotlib."""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import Spread, write_atomic

if TYPE_CHECKING:
    from training import Training

PANEL_WIDTH, BAR_HEIGHT = 6.0, 0.28  # inches


def add_plot_option(parser: argparse.ArgumentParser, of: str) -> None:
    """``--plot FILE``."""
    parser.add_argument(
        "--plot", type=_picture, metavar="FILE", help=f"draw {of}: a .png or an .svg (needs matplotlib)"
    )


def _picture(text: str) -> Path:
    if not text.endswith((".png", ".svg")):
        raise argparse.ArgumentTypeError(f"{text!r} ends neither in .png nor in .svg")
    return Path(text)


def require_matplotlib() -> None:
    """Ends the program at once, rather than after the measurement, where the plot cannot be drawn."""
    try:
        import matplotlib  # noqa: F401  optional: only --plot needs it
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'torchcache-dataset[bench]'") from None


def new_figure(width: float, height: float) -> Any:
    """A figure that needs no display and is in no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Writes a figure in the format that the file's name says."""
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:], dpi=150)
    write_atomic(path, image.getvalue())
    print(f"plot: {path}")


def plot_epochs(path: Path, trainings: Mapping[str, Training], title: str) -> None:
    """For each epoch a bar for each training, the part spent waiting for data in a darker shade."""
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    width = 0.8 / len(trainings)
    for position, (name, run) in enumerate(trainings.items()):
        at = np.arange(1, len(run.epochs) + 1) + (position - (len(trainings) - 1) / 2) * width
        whole = [epoch.train_s + epoch.test_s for epoch in run.epochs]
        waits = [epoch.train_wait_s + epoch.test_wait_s for epoch in run.epochs]
        axes.bar(at, whole, width, color=f"C{position}", alpha=0.45, label=name)
        axes.bar(at, waits, width, color=f"C{position}", label=f"{name}: waiting for data")
    axes.set(title=title, xlabel="epoch", ylabel="seconds (training and test)", xticks=range(1, len(whole) + 1))
    axes.legend()
    save(figure, path)


def plot_bars(path: Path, panels: Mapping[str, Mapping[str, Spread]], unit: str, highlight: str) -> None:
    """For each panel a bar for each contestant, on a logarithmic scale, with a line from its lowest to its highest.

    Args:
        path: the picture.
        panels: by title, the contestants' figures by name, in the order from top to bottom.
        unit: what the figures are.
        highlight: contestants whose names begin so are drawn in another colour.
    """
    most = max(map(len, panels.values()))
    figure = new_figure(PANEL_WIDTH * len(panels), 1.2 + BAR_HEIGHT * most)
    for axes, (title, spreads) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        at = -np.arange(len(spreads))
        medians = [spread.median for spread in spreads.values()]
        lower = [spread.median - spread.low for spread in spreads.values()]
        upper = [spread.high - spread.median for spread in spreads.values()]
        colours = ["C1" if name.startswith(highlight) else "C0" for name in spreads]
        axes.barh(at, medians, color=colours, xerr=[lower, upper], error_kw={"alpha": 0.5})
        axes.set(title=title, xlabel=unit, xscale="log", yticks=at, yticklabels=list(spreads))
    save(figure, path)
