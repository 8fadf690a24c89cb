"""The command ``torchcache``: what a user does around training."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table
from tqdm.auto import tqdm

from torchcache import catalog, doctor, location, progress, tables
from torchcache.catalog import StoreInfo
from torchcache.errors import FingerprintError, StoreError, TorchcacheError
from torchcache.factory import FactoryError, cached_dataset, described
from torchcache.staging import stage
from torchcache.topology import torchrun_topology

PROBLEM, MISUSE = 1, 2  # exit statuses

app = typer.Typer(
    help="What is cached, filling ahead, bringing data near, cleaning up.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text, which a pipe and a narrow terminal take
    pretty_exceptions_enable=False,
)
CacheDir = Annotated[Path | None, typer.Option(help="The folder of the stores; else $CACHE_DIR.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_STORE = "The name of its folder, a beginning of it that no other has, or a path."
_FACTORY = "The dataset, or it cached: a function without arguments that makes it, or the object."
StoreName = Annotated[str, typer.Argument(metavar="STORE", help=_STORE, show_default=False)]
Factory = Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help=_FACTORY, show_default=False)]


@app.command()
def ls(cache_dir: CacheDir = None, json: Json = False) -> None:
    """List the stores."""
    folder = location.cache_folder(cache_dir)
    found = catalog.stores(folder)
    _show(found, json, tables.stores(found, folder))


@app.command()
def info(store: StoreName, cache_dir: CacheDir = None, json: Json = False) -> None:
    """Tell what a store holds: its samples' structure, its blocks, its totals."""
    known = _store(store, cache_dir)
    contents = catalog.describe(known.path) if known.key is not None else None
    _show({"store": known, "contents": contents}, json, tables.description(known, contents))
    if known.problem:
        raise typer.Exit(PROBLEM)


@app.command()
def fill(
    factory: Factory,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read.")] = 0,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Read everything that is not cached yet; under torchrun on several nodes, what this one keeps.

    Goes on where it was stopped; several may run at once.
    """
    with closing(cached_dataset(factory, cache_dir)) as dataset:
        length, part = len(dataset), _part_of_this_node(len(dataset))
        with _user_errors(f"reading {factory}"):
            dataset.fill(num_workers=workers, progress=not json, indices=part)
        stats, complete = dataset.stats, dataset.complete
        text = (
            f"{dataset.path.name}: {stats.samples_cached} of {length} samples, {tables.size(stats.bytes_cached)}, "
            f"{stats.source_reads} source reads in {tables.duration(stats.source_seconds)}"
        )
        _show({"path": dataset.path, "length": length, "complete": complete, "stats": stats}, json, [text])
        if stats.samples_cached < (length if part is None else len(part)):
            raise typer.Exit(PROBLEM)


def _part_of_this_node(length: int) -> list[int] | None:
    """Under torchrun on several nodes the samples that this node keeps (``ExchangeLoader``); else all of them."""
    topology = torchrun_topology()
    return None if topology is None or topology.num_nodes == 1 else topology.part(length, seed=0).tolist()


@app.command()
def verify(
    store: Annotated[str | None, typer.Argument(metavar="STORE", help=f"{_STORE} All of them without it.")] = None,
    source: Annotated[
        str | None, typer.Option(metavar="MODULE:FACTORY", help=f"Compare the samples with a dataset. {_FACTORY}")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Compare so many only, chosen at random.")] = None,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Read stores in full, and check everything they say; with a source, compare the samples with it."""
    dataset = None
    if source is not None:
        with closing(cached_dataset(source, cache_dir)) as cached:
            dataset, place = cached.dataset, str(cached.path)
        store = store or place
    if store is not None:
        paths = [_store(store, cache_dir).path]
    else:
        known = catalog.stores(location.cache_folder(cache_dir))
        paths = [info.path for info in known if info.state not in ("set aside", "leftover", "empty")]
    results = [_verified(path, dataset, samples) for path in paths]
    _show(results, json, [result["text"] for result in results] or ["no stores"])
    if any(result["problem"] for result in results):
        raise typer.Exit(PROBLEM)


def _verified(path: Path, dataset: Any, samples: int | None) -> dict[str, Any]:
    report, compared, problem = None, None, ""
    try:
        with _bar(path.name) as bar:
            report = catalog.verify(path, lambda nbytes, total: _advance(bar, nbytes, total))
        if dataset is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # what could not be compared is a problem here
                compared = catalog.compare(path, dataset, samples)
    except (TorchcacheError, UserWarning) as error:
        problem = str(error)
    text = tables.escaped(f"{path.name}: {problem}") if report is None or problem else tables.report(report)
    if compared is not None:
        text += f"; {compared} samples are those of the source"
    return {"path": path, "problem": problem, "report": report, "compared": compared, "text": text}


@app.command()
def warm(
    store: StoreName,
    force: Annotated[bool, typer.Option("--force", help="Also if it does not fit into memory.")] = False,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Read a store into the page cache."""
    path = _store(store, cache_dir).path
    with _bar(path.name) as bar:
        bar.total = catalog.data_bytes(path)
        nbytes = catalog.warm(path, force=force, progress=bar.update)
    _show({"path": path, "nbytes": nbytes}, json, [f"{path.name}: {tables.size(nbytes)} read"])


@app.command()
def rm(
    stores: Annotated[list[str], typer.Argument(metavar="STORE", help=_STORE, show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Also while a process uses it.")] = False,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Remove stores; not while a process uses them."""
    found = [_store(store, cache_dir) for store in stores]
    results = []
    for known in found:
        problem = ""
        try:
            catalog.destroy(known.path, force=force)
        except StoreError as error:
            problem = str(error)
        text = problem or f"{known.path.name}: removed, {tables.size(known.nbytes)}"
        results.append({"path": known.path, "problem": problem, "nbytes": known.nbytes, "text": text})
    _show(results, json, [tables.escaped(str(result["text"])) for result in results])
    if any(result["problem"] for result in results):
        raise typer.Exit(PROBLEM)


@app.command()
def prune(
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Remove the least recently used until the others take this.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="Remove what was last used longer ago, such as 7d.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Remove stores that nobody uses: damaged, empty and left-over ones, then by age and by size."""
    found = catalog.prune(
        location.cache_folder(cache_dir),
        max_bytes=_parsed(tables.parse_size, max_bytes, "--max-bytes"),
        older_than_s=_parsed(tables.parse_duration, older_than, "--older-than"),
        dry_run=dry_run,
    )
    _show(found, json, tables.pruned(found, dry_run))


@app.command("stage")
def run_stage(
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix, gs://…, https://…, a path.")],
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="As --cache-dir.")] = None,
    include: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Only these paths; repeatable.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Not these paths; repeatable.")] = None,
    shard: Annotated[
        str, typer.Option(metavar="K/N", help="Every N-th file from number K on, from 0; auto: as torchrun's nodes.")
    ] = "0/1",
    workers: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 16,
    endpoint_url: Annotated[str | None, typer.Option(help="The address of OBS, MinIO, Ceph, …")] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="For fsspec; repeatable.")] = None,
    verify: Annotated[bool, typer.Option(help="Compare with the MD5 that the store gives.")] = True,
    offline: Annotated[bool, typer.Option("--offline", help="Ask nothing; there has to be a whole copy.")] = False,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Copy files of an object store to this node's disk, and print where they are."""
    options = dict(_parsed(tables.parse_option, text, "--option") for text in option or ())
    if endpoint_url is not None:
        options["endpoint_url"] = endpoint_url
    path = stage(
        url,
        folder or cache_dir,
        include=include or None,
        exclude=exclude or None,
        shard=_parsed(_shard, shard, "--shard"),
        workers=workers,
        progress=not json,
        storage_options=options,
        verify=verify,
        offline=offline,
    )
    _show({"path": path}, json, [tables.escaped(str(path))])


def _shard(text: str) -> tuple[int, int]:
    topology = torchrun_topology() if text == "auto" else None
    return tables.parse_shard(text) if topology is None else (topology.node, topology.num_nodes)


@app.command("doctor")
def run_doctor(cache_dir: CacheDir = None, json: Json = False) -> None:
    """Look for what would go wrong here, and say what to do."""
    found = doctor.examine(location.cache_folder(cache_dir))
    _show(found, json, tables.findings(found))
    if any(finding.level == "problem" for finding in found):
        raise typer.Exit(PROBLEM)


def main() -> None:
    """Runs the command; a user's mistake is a line on stderr, and an exit status."""
    warnings.showwarning = lambda message, *_, **__: typer.echo(f"torchcache: {message}", err=True)
    try:
        app(prog_name="torchcache")
    except FactoryError as error:
        _end(str(error), MISUSE)
    except FingerprintError as error:
        _end(f"{error}. Let the factory give CachedDataset(dataset, key=...)", MISUSE)
    except (TorchcacheError, OSError) as error:
        _end(str(error), PROBLEM)


def _end(message: str, status: int) -> NoReturn:
    typer.echo(f"torchcache: {message}", err=True)
    sys.exit(status)


def _show(value: Any, as_json: bool, parts: Iterable[Table | str]) -> None:
    if as_json:
        typer.echo(tables.to_json(value))
        return
    console = tables.console()
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def _store(name: str, cache_dir: Path | None) -> StoreInfo:
    """The store that the user means."""
    folder = location.cache_folder(cache_dir)
    path = Path(name).expanduser()
    if os.sep not in name:
        path = folder / name
        if not path.exists():
            found = [known for known in catalog.stores(folder) if known.path.name.startswith(name)]
            if len(found) > 1:
                names = ", ".join(known.path.name for known in found)
                raise typer.BadParameter(f"{name!r} may be any of these: {names}")
            if found:
                return found[0]
    known = catalog.inspect(path.absolute())
    if known is None:
        raise typer.BadParameter(f"there is no store {name!r}; `torchcache ls` lists those under {folder}")
    return known


def _parsed(parse: Callable[[str], Any], text: str | None, option: str) -> Any:
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


@contextmanager
def _user_errors(doing: str) -> Iterator[None]:
    """Turns what the user's dataset raises into a line; what torchcache raises is one already."""
    try:
        yield
    except TorchcacheError:
        raise
    except Exception as error:
        _end(f"{doing} raised {described(error)}", PROBLEM)


def _bar(name: str) -> tqdm[Any]:
    return progress.bar(desc=name, unit="B", unit_scale=True, unit_divisor=1024)


def _advance(bar: tqdm[Any], nbytes: int, total: int) -> None:
    bar.total = total
    bar.update(nbytes)
