"""What the command prints: tables for people, JSON for programs; sizes and times in words, and from words."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from torchcache.catalog import Description, Pruned, StoreInfo, VerifyReport
from torchcache.doctor import Finding

PIPE_WIDTH = 10_000  # columns where there is no terminal: nothing is wrapped or cut
MOST_DAYS, MOST_PARTS = 7, 40  # that are printed
NAME_WIDTH = 20  # columns that a name has at least
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def console() -> Console:
    """Where tables go: in colour and as wide as the terminal is, or plain and as wide as they are."""
    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else PIPE_WIDTH, highlight=False, no_color=not terminal)


def to_json(value: Any) -> str:
    """JSON of what the catalogue gives."""
    return json.dumps(_plain(value), indent=2, default=str)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def size(nbytes: int | None) -> str:
    """A number of bytes in words; a dash for one that is not known."""
    if nbytes is None:
        return "-"
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{nbytes} B" if power == 0 else f"{nbytes / 1024**power:.1f} {_UNITS[power]}"


def parse_size(text: str) -> int:
    """A number of bytes from ``200G``, ``1.5 TiB`` or ``4096``; units are powers of 1024.

    Raises:
        ValueError: if it is anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGTP])(?:i?B)?|B)?\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a size; write it as 500M, 200G or 1.5T")
    power = " KMGTP".index(match[2].upper()) if match[2] else 0
    return int(float(match[1]) * 1024**power)


def parse_duration(text: str) -> float:
    """Seconds from ``90s``, ``12h``, ``7d`` or ``2w``.

    Raises:
        ValueError: if it is anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is not a time; write it as 90s, 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2].lower()]


def parse_option(text: str) -> tuple[str, Any]:
    """Name and value of ``name=value``; the value is JSON if it can be, else the text itself.

    Raises:
        ValueError: if there is no name.
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def parse_shard(text: str) -> tuple[int, int]:
    """``(k, n)`` from ``k/n``, counted from 0.

    Raises:
        ValueError: if it is anything else.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ValueError(f"{text!r} is not a shard; write it as 0/4, 1/4, 2/4 or 3/4, or as auto under torchrun")
    return int(match[1]), int(match[2])


def duration(seconds: float | None) -> str:
    """A time in words, in its two largest units; a dash for one that is not known."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86_400)
    if hours == 0:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if days == 0 else f"{days} d {hours % 24} h"


def ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    return f"{int(seconds)} s ago" if seconds < 60 else f"{duration(seconds)} ago"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> Table | str:
    """A table; on a terminal that is too narrow for it first with names in several lines, then as a list.

    Args:
        headings: of the columns.
        rows: the cells.
        numbers: the columns that are aligned on the right.
    """
    wide = Table(box=box.SIMPLE_HEAD, show_header=any(headings), show_edge=False, pad_edge=False, padding=(0, 1))
    for i, heading in enumerate(headings):
        wide.add_column(
            heading,
            justify="right" if i in numbers else "left",
            overflow="fold",
            min_width=NAME_WIDTH if i == 0 else None,
            no_wrap=i > 0,
        )
    for row in rows:
        wide.add_row(*map(escaped, row))
    longest = max((len(row[0]) for row in rows), default=0)
    needed = Console(width=PIPE_WIDTH).measure(wide).maximum - max(0, longest - NAME_WIDTH)
    if needed <= console().width:
        return wide
    lines = []
    for name, *cells in rows:
        pairs = [(heading, cell) for heading, cell in zip(headings[1:], cells, strict=True) if cell]
        lines += [name, *(f"  {heading}: {cell}" if heading else f"  {cell}" for heading, cell in pairs)]
    return escaped("\n".join(lines))


def escaped(text: str) -> str:
    """Text in which rich sees no markup, and a terminal no commands."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text).replace("[", r"\[")


def stores(infos: Sequence[StoreInfo], cache_dir: Path) -> Iterable[Table | str]:
    """The list of stores."""
    if not infos:
        yield f"no stores under {escaped(str(cache_dir))}"
        return
    headings = (
        "store",
        "state",
        "samples",
        "size",
        "in RAM",
        "source reads",
        "source time",
        "saved reads",
        "last used",
        "used by",
    )
    rows = [
        (
            info.path.name,
            info.state,
            "-" if info.samples is None else f"{info.samples}/{'?' if info.length is None else info.length}",
            size(info.nbytes),
            size(info.resident_bytes),
            "-" if info.source_reads is None else str(info.source_reads),
            duration(info.source_seconds),
            str(info.hits),
            ago(info.last_used),
            f"{info.filling} filling" if info.filling else "in use" if info.in_use else "",
        )
        for info in infos
    ]
    yield table(headings, rows, numbers=(2, 3, 4, 5, 6, 7))
    for info in infos:
        if info.problem:
            yield escaped(f"{info.path.name}: {info.problem}")
    total = sum(info.nbytes for info in infos)
    yield f"{len(infos)} stores, {size(total)} under {escaped(str(cache_dir))}"


def description(info: StoreInfo, found: Description | None) -> Iterable[Table | str]:
    """What is known of one store."""
    pairs = [
        ("folder", str(info.path)),
        ("state", info.state + (f": {info.problem}" if info.problem else "")),
        ("key", (info.key or "-") + (", given by the user" if found is not None and found.parts == {} else "")),
        ("dataset", info.source or "-"),
        ("samples", "-" if info.samples is None else f"{info.samples} of {info.length}"),
        ("size", f"{size(info.nbytes)} on the disk, {size(info.resident_bytes)} of it in RAM"),
        (
            "source reads",
            "-" if info.source_reads is None else f"{info.source_reads} in {duration(info.source_seconds)}",
        ),
        ("saved reads", _by_day(info)),
        ("last used", ago(info.last_used)),
        ("used by", f"{info.filling} processes that fill it" if info.filling else "some" if info.in_use else "nobody"),
    ]
    if found is not None:
        pairs += [
            ("duplicate reads", str(found.duplicate_reads)),
            ("being read now", f"{found.claimed} samples"),
            ("blocks", f"{found.blocks}, {size(found.block_bytes)}"),
            ("format", f"{found.format_version}, {'sealed' if found.sealed else 'not sealed'}"),
            ("pickled objects", "allowed" if found.allow_pickle else "none"),
        ]
    yield table(("", ""), pairs)
    if found is not None and found.parts:
        yield f"what went into the key: {len(found.parts)} parts"
        yield table(("part", "value, or a digest of it"), list(found.parts.items())[:MOST_PARTS])
        if len(found.parts) > MOST_PARTS:
            yield f"and {len(found.parts) - MOST_PARTS} more; --json has all"
    elif found is not None and found.parts is None:
        yield "what went into the key: -"
    for number, schema in enumerate(found.schemas if found else ()):
        yield f"structure {number}: {schema.samples} samples"
        rows = [
            (c.name, c.kind, c.dtype, "differs" if c.shape is None else str(list(c.shape)), size(c.nbytes))
            for c in schema.columns
        ]
        yield table(("leaf", "kind", "dtype", "shape", "size"), rows, numbers=(4,))


def _by_day(info: StoreInfo) -> str:
    """How many samples came from the store, in all and on the last days."""
    today = int(time.time() // _SECONDS["d"])
    days = [(day, info.hits_by_day[day]) for day in sorted(info.hits_by_day, reverse=True) if day >= 0][:MOST_DAYS]
    text = [f"{count} {'today' if day == today else _date(day)}" for day, count in days]
    return f"{info.hits}" + (f" ({', '.join(text)})" if text else "")


def _date(day: int) -> str:
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(day * _SECONDS["d"]))
    except (OverflowError, ValueError, OSError):  # the file may say anything
        return f"on day {day}"


def report(found: VerifyReport) -> str:
    """What has been verified, in a line."""
    sealed = "and the index of all samples" if found.sealed else "not sealed"
    return (
        f"{found.path.name}: ok. {found.samples} of {found.length} samples, {found.blocks} blocks "
        f"({size(found.nbytes)}), {sealed}, in {duration(found.seconds)}"
    )


def pruned(found: Pruned, dry_run: bool) -> Iterable[Table | str]:
    """What has been removed, or would be."""
    if found.removed:
        rows = [(info.path.name, reason, size(info.nbytes), ago(info.last_used)) for info, reason in found.removed]
        yield table(("store", "why", "size", "last used"), rows, numbers=(2,))
    verb = "would be removed" if dry_run else "removed"
    yield f"{len(found.removed)} {verb}, {size(found.nbytes)}; {size(found.left_bytes)} left"


def findings(found: Sequence[Finding]) -> Iterable[Table | str]:
    """What the doctor has found."""
    yield table(("what", "level", "found"), [(f.what, f.level, f.found) for f in found])
    for f in found:
        if f.level != "ok":
            yield escaped(f"{f.what}: {f.risk}. {f.remedy}")
    problems = sum(f.level == "problem" for f in found)
    yield f"{problems} problems, {sum(f.level == 'note' for f in found)} notes"
