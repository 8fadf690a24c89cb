"""Several nodes on one machine: processes with a cache folder for each node, gloo between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Source
from torch.utils.data import DistributedSampler

from torchcache.distributed import ExchangeLoader, PartitionedSampler, find_topology
from torchcache.flatten import flatten_many
from torchcache.messages import Read, pack, unpack
from torchcache.plan import Plan, order_of_all_ranks, servers_of
from torchcache.topology import Topology, owners_of

HERE = Path(__file__).parent
ENDED_S = 120  # a test that has not ended by then hangs


def start(
    scenario: str, folder: Path, *, nodes: int = 2, ranks_per_node: int = 2, namespaces: list[str] | None = None
) -> list[subprocess.Popen[str]]:
    """Starts the ranks of a job, each node with a cache folder of its own, as torchrun would.

    With ``namespaces`` each node is in the network namespace of that name.
    """
    world = nodes * ranks_per_node
    rendezvous = folder / f"rendezvous-{os.urandom(4).hex()}"
    processes = []
    for rank in range(world):
        node = rank // ranks_per_node
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CACHE_DIR": str(folder / f"node{node}"),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(nodes),
            "GLOO_SOCKET_IFNAME": "eth0" if namespaces else "lo",
        }
        within = ["ip", "netns", "exec", namespaces[node]] if namespaces else []
        command = [*within, sys.executable, str(HERE / "distributed_job.py"), scenario, str(folder), str(rendezvous)]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=HERE)
        )
    return processes


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    try:
        return [process.communicate(timeout=ENDED_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def run(scenario: str, folder: Path, **kwargs: int) -> None:
    processes = start(scenario, folder, **kwargs)
    texts = outputs(processes)
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(texts)


def test_the_exchange_gives_what_a_distributed_sampler_draws(tmp_path: Path) -> None:
    """Cold and warm, fixed and ragged samples, a transform, broken off, resumed; the source is read once a sample."""
    run("epochs", tmp_path)
    for name, length in (("fixed", 203), ("ragged", 50)):
        assert Source(length, tmp_path / name).reads() == Counter(range(length))


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_batches_that_are_kept_stay_as_they_are(tmp_path: Path, ranks_per_node: int) -> None:
    run("keep", tmp_path, ranks_per_node=ranks_per_node)
    assert Source(130, tmp_path / "source").reads() == Counter(range(130))


def test_steps_that_only_some_ranks_have_cached(tmp_path: Path) -> None:
    run("some", tmp_path)
    assert set(Source(120, tmp_path / "source").reads()) == set(range(120))


def test_a_message_that_cannot_be_written_reaches_every_rank_as_an_error(tmp_path: Path) -> None:
    run("late", tmp_path)


def test_one_rank_alone(tmp_path: Path) -> None:
    run("whole", tmp_path, nodes=1, ranks_per_node=1)


def test_each_node_fills_its_part_ahead(tmp_path: Path) -> None:
    run("part", tmp_path)
    assert Source(90, tmp_path / "source").reads() == Counter(range(90))


def test_an_error_of_the_source_reaches_every_rank(tmp_path: Path) -> None:
    run("error", tmp_path)


def test_a_rank_that_dies_ends_the_job_and_another_number_of_nodes_goes_on(tmp_path: Path) -> None:
    processes = start("death", tmp_path)
    texts = outputs(processes)
    assert processes[1].returncode == -signal.SIGKILL
    for rank in (0, 2, 3):
        assert processes[rank].returncode == 3, texts[rank]
    before = sum(Source(64, tmp_path / "source").reads().values())
    run("whole", tmp_path, nodes=1, ranks_per_node=2)
    after = Source(64, tmp_path / "source").reads()
    assert set(after) == set(range(64))
    assert sum(after.values()) < before + 64  # node 0 has kept what it had


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them."""
    names = [f"torchcache-{os.getpid()}-{n}" for n in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.213.7.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


def test_a_host_that_is_cut_off_ends_the_job(tmp_path: Path, hosts: list[str]) -> None:
    os.mkfifo(tmp_path / "ready")
    os.mkfifo(tmp_path / "cut")
    processes = start("cut", tmp_path, ranks_per_node=1, namespaces=hosts)
    (tmp_path / "ready").read_bytes()  # waits until the first rank is in the middle of its epoch
    ip("-n", hosts[1], "link", "set", "eth0", "down")
    (tmp_path / "cut").write_bytes(b"")
    texts = outputs(processes)
    assert [process.returncode for process in processes] == [3, 3], texts


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("length", "replicas"), [(100, 4), (101, 4), (3, 8), (1, 1)])
def test_what_other_ranks_draw_is_known(length: int, replicas: int, shuffle: bool, drop_last: bool) -> None:
    if drop_last and length < replicas:
        pytest.skip("DistributedSampler itself cannot")
    samplers = [
        DistributedSampler(range(length), replicas, rank, shuffle=shuffle, seed=5, drop_last=drop_last)
        for rank in range(replicas)
    ]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        drawn = [list(sampler) for sampler in samplers]
        for sampler in samplers:
            assert order_of_all_ranks(sampler).tolist() == drawn


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 2), (0, 0, 0, 1), (0,)])
@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_every_rank_is_served_its_batches(nodes: tuple[int, ...], batch_size: int) -> None:
    world, length = len(nodes), 90
    owner = owners_of(Topology(0, nodes).parts(length, seed=0), length)
    order = order_of_all_ranks(DistributedSampler(range(length), world, 0, seed=3))
    plans = [
        Plan(order, batch_size, owner, servers_of(topology), rank)
        for rank in range(world)
        if (topology := Topology(rank, nodes))
    ]
    for step, wanted in enumerate(order.split(batch_size, dim=1)):
        got = torch.full_like(wanted, -1)
        for rank, plan in enumerate(plans):
            indices, numbers, counts = plan.step(step)
            requesters = torch.arange(world).repeat_interleave(torch.tensor(counts))
            for index, number, requester in zip(indices, numbers, requesters, strict=True):
                assert got[requester, number] == -1
                assert rank == requester or nodes[rank] == owner[index] != nodes[requester]
                got[requester, number] = index
            assert plan.count(step) == wanted.shape[1]
        assert torch.equal(got, wanted)


class Backwards(DistributedSampler[Any]):
    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[::-1])


def test_what_other_ranks_draw_is_known_of_subclasses() -> None:
    samplers = [Backwards(range(10), 2, rank) for rank in range(2)]
    assert order_of_all_ranks(samplers[0]).tolist() == [list(sampler) for sampler in samplers]


def samplers(length: int, replicas: int, nodes: int, **kwargs: Any) -> list[PartitionedSampler]:
    return [PartitionedSampler(range(length), replicas, rank, num_nodes=nodes, **kwargs) for rank in range(replicas)]


@pytest.mark.parametrize("length", [64, 101])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_node_keeps_to_its_part(length: int, drop_last: bool, shuffle: bool) -> None:
    ranks = samplers(length, 4, 2, drop_last=drop_last, shuffle=shuffle)
    parts = [set(ranks[0].part().tolist()), set(ranks[2].part().tolist())]
    assert sorted([*parts[0], *parts[1]]) == list(range(length))
    epochs = []
    for epoch in range(2):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        drawn = [list(sampler) for sampler in ranks]
        assert {len(indices) for indices in drawn} == {len(ranks[0])}
        for rank, indices in enumerate(drawn):
            assert set(indices) <= parts[rank // 2]
        if not drop_last:
            assert set().union(*drawn) == set(range(length))
        else:
            assert sum(len(set(indices)) for indices in drawn) == len(ranks[0]) * 4
        epochs.append(drawn)
    assert (epochs[0] != epochs[1]) == shuffle


def test_repartitioning() -> None:
    ranks = samplers(100, 2, 2, repartition_every=2)
    parts = []
    for epoch in range(4):
        ranks[0].set_epoch(epoch)
        parts.append(ranks[0].part().tolist())
    assert parts[0] == parts[1] != parts[2] == parts[3]


def test_a_sampler_resumes() -> None:
    sampler, other = (PartitionedSampler(range(100), 2, 0, num_nodes=2) for _ in range(2))
    sampler.set_epoch(3)
    iterator = iter(sampler)
    first = [next(iterator) for _ in range(20)]
    other.load_state_dict(sampler.state_dict())
    assert other.state_dict()["epoch"] == 3
    assert first + list(other) == list(sampler)
    assert len(list(other)) == 50  # the next epoch is a whole one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_replicas": 4, "rank": 4}, "rank 4 is not one of 4"),
        ({"num_replicas": 4, "rank": 0, "num_nodes": 3}, "cannot be spread evenly over num_nodes=3"),
        ({"num_replicas": 4, "rank": 3, "num_nodes": 2, "node_rank": 0}, "is on node 1, not on node_rank=0"),
        ({"num_replicas": 4, "rank": 3, "node_rank": 0}, "needs num_nodes"),
        ({"num_replicas": 4, "rank": 0, "num_nodes": 2, "repartition_every": 0}, "repartition_every=0"),
    ],
)
def test_bad_arguments(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PartitionedSampler(range(100), **arguments)  # type: ignore[arg-type]


def test_too_few_samples_for_the_nodes() -> None:
    with pytest.raises(ValueError, match="1 samples cannot be split over 2 nodes"):
        samplers(1, 2, 2)


def test_nodes_with_different_numbers_of_ranks() -> None:
    topology = Topology(0, (0, 0, 0, 1))
    parts = topology.parts(400, seed=0)
    assert [len(part) for part in parts] == [300, 100]
    owners = owners_of(parts, 400)
    assert torch.equal(torch.nonzero(owners == 1)[:, 0], parts[1].sort().values)
    assert (topology.ranks_of, topology.local_rank_of) == ([[0, 1, 2], [3]], [0, 1, 2, 0])


@pytest.mark.parametrize("seed", [0, 1])
def test_every_step_needs_something_of_every_node(seed: int) -> None:
    owners = owners_of(Topology(0, (0, 1)).parts(1000, seed=0), 1000)
    order = order_of_all_ranks(DistributedSampler(range(1000), 2, 0, seed=seed))
    for step in order.split(50, dim=1):
        assert 20 < int(owners[step].sum()) < 80


def test_torchrun_tells_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", 4), ("RANK", 3), ("LOCAL_WORLD_SIZE", 2), ("GROUP_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GROUP_RANK", "1")
    assert find_topology(4, 3) == Topology(3, (0, 0, 1, 1))
    monkeypatch.setenv("GROUP_RANK", "0")  # not as torchrun numbers them: one node, as far as this process knows
    assert find_topology(4, 3) == Topology(3, (0, 0, 0, 0))


def test_messages() -> None:
    samples: list[Any] = [
        (torch.arange(i + 1.0), f"text {i}", {"n": i, "image": torch.full((3, 5), i, dtype=torch.uint8)})
        for i in range(7)
    ]
    samples += [torch.tensor([]), (), 3.5]
    flats = flatten_many(list(range(len(samples))), samples)
    message = pack([Read(flat) for flat in flats])
    assert message.nbytes % 64 == 0
    data = torch.empty(message.nbytes, dtype=torch.uint8).numpy()
    message.write_to(data)
    found = {
        number: sample
        for group in unpack(data)
        for number, sample in zip(group.numbers.tolist(), group.samples(), strict=True)
    }
    assert repr([found[i] for i in range(len(samples))]) == repr(samples)


def test_other_loaders_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"wrap it: CachedDataset"):
        ExchangeLoader([1, 2, 3], DistributedSampler([1, 2, 3], 1, 0))  # type: ignore[arg-type]
