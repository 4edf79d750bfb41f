"""Section memory: a node's memory beyond slots and parity, compared with full copies.

Three sidecars and three training processes represent three nodes. The figures are bytes of one
node: the shared memory of slots and parity rows, and the other memory of its processes. For the
sidecar that is all it has; for the trainer it is the memory that snapshots add. Pages that
processes share (code) are divided among them (PSS of ``proc(5)``), so the figures can be summed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table

from holdfast.ckpt.torch_private import TCPStore
from holdfast.tools.bench.data_path import trainee
from holdfast.tools.bench.data_path.lost_time import answer, end
from holdfast.tools.bench.data_path.trainee import RankGuard, TraineeSeat, TrainingWindow
from holdfast.tools.bench.nodes import SLOTS, Nodes
from holdfast.tools.bench.samples import BenchSetup, Figure

NAMES: Final = ("a", "b", "c")
SECTION: Final = "memory"
PARITY, COPIES = "parity 1 of 3", "a whole copy"
_COLUMNS: Final = {PARITY: 0, COPIES: 1}
_SMALLER: Final = 4
_SAMPLE_S: Final = 0.02
_MIB: Final = 1 << 20


class Beyond(NamedTuple):
    """Bytes of a process besides shared memory: resident, and with shared pages divided (PSS)."""

    resident: int
    share: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Bytes that one node holds; ``peak`` is the maximum of its sidecar's private memory."""

    slots: int
    parity: int
    sidecar: Beyond
    peak: int
    trainer: Beyond


def memory(setup: BenchSetup) -> list[Figure]:
    """Measure nodes of a quarter of the size and of the full size, with parity and with copies."""
    figures: list[Figure] = []
    smaller = () if setup.quick else (setup.size_bytes // _SMALLER,)
    for size_bytes in (*smaller, setup.size_bytes):
        found = {guard: _measure(setup, size_bytes, guard) for guard in _COLUMNS}
        for guard, nodes in found.items():
            figures += _figures(f"{readable(size_bytes)} a node, {guard}", nodes, found[COPIES])
        setup.lap()
    return figures


def _figures(
    name: str, nodes: Sequence[NodeMemory], copies: Sequence[NodeMemory]
) -> Iterator[Figure]:
    beyond = [each.sidecar.share + each.trainer.share for each in nodes]
    used = [each.slots + each.parity for each in nodes]
    columns = {
        "slots": [each.slots for each in nodes],
        "parity": [each.parity for each in nodes],
        "sidecar, PSS beyond": [each.sidecar.share for each in nodes],
        "sidecar, RSS beyond": [each.sidecar.resident for each in nodes],
        "sidecar, most for itself alone": [each.peak for each in nodes],
        "trainer, PSS added": [each.trainer.share for each in nodes],
        "trainer, RSS added": [each.trainer.resident for each in nodes],
    }
    for what, values in columns.items():
        yield _figure(f"{name}: {what}", [value / _MIB for value in values], "MiB")
    shares = [100 * extra / all_ for extra, all_ in zip(beyond, used, strict=True)]
    yield _figure(f"{name}: beyond slots and parity", shares, "%")
    totals = [(all_ + extra) / _MIB for extra, all_ in zip(beyond, used, strict=True)]
    reference = fmean(
        each.slots + each.parity + each.sidecar.share + each.trainer.share for each in copies
    )
    total = _figure(f"{name}: all of it", totals, "MiB")
    yield Figure(
        section=SECTION,
        name=total.name,
        value=total.value,
        unit=total.unit,
        low=total.low,
        high=total.high,
        versus=COPIES,
        ratio=total.value * _MIB / reference,
    )


def _figure(name: str, values: Sequence[float], unit: str) -> Figure:
    return Figure(
        section=SECTION,
        name=name,
        value=fmean(values),
        unit=unit,
        low=min(values),
        high=max(values),
    )


def _measure(setup: BenchSetup, size_bytes: int, guard: str) -> list[NodeMemory]:
    """Train with a snapshot after every step until every slot is in use; return the nodes."""
    with Nodes(setup.directory, NAMES) as nodes, _trainees(setup, nodes, size_bytes) as trainees:
        nodes.adopt(parity=1, columns=_COLUMNS[guard])
        pids = [pid for pid, _ in trainees]
        _train(trainees, trainee.NOTHING, steps=3)
        before = [_beyond(pid) for pid in pids]
        peaks = dict.fromkeys(nodes.pids, 0)
        for _ in range(setup.repeat + SLOTS):
            _train(trainees, trainee.PARITY, steps=3, peaks=peaks)
        after = [_beyond(pid) for pid in pids]
        used = [client.status()["bytes"] for client in nodes.clients.values()]
        return [
            NodeMemory(
                slots=bytes_["slots"],
                parity=bytes_["parity"],
                sidecar=_beyond(pid),
                peak=peaks[pid],
                trainer=Beyond(now.resident - then.resident, now.share - then.share),
            )
            for pid, bytes_, then, now in zip(nodes.pids, used, before, after, strict=True)
        ]


def _train(
    trainees: Sequence[tuple[int, Connection]],
    way: str,
    *,
    steps: int,
    peaks: dict[int, int] | None = None,
) -> None:
    """Train one window on all ranks; record the peak private memory of the ``peaks`` processes."""
    window = TrainingWindow(way=way, steps=steps, every=1, products=0)
    for _, pipe in trainees:
        pipe.send(window)
    for _, pipe in trainees:
        while peaks and not pipe.poll(_SAMPLE_S):
            for pid, most in peaks.items():
                peaks[pid] = max(most, _fields(pid, "status")["RssAnon"])
        answer(pipe)


def _beyond(pid: int) -> Beyond:
    """Return the memory of a process besides shared memory."""
    found = _fields(pid, "status")
    share = _fields(pid, "smaps_rollup")
    return Beyond(found["RssAnon"] + found["RssFile"], share["Pss"] - share["Pss_Shmem"])


def _fields(pid: int, name: str) -> Mapping[str, int]:
    """Return the sizes in a file of ``/proc``, in bytes."""
    lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {key: int(value.split()[0]) << 10 for key, value in pairs}


@contextmanager
def _trainees(
    setup: BenchSetup, nodes: Nodes, size_bytes: int
) -> Iterator[list[tuple[int, Connection]]]:
    """Start a training process on each node; yield their process ids and pipes."""
    with ExitStack() as stack:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        found = []
        for rank, name in enumerate(NAMES):
            pipe, theirs = context.Pipe()
            guard = RankGuard(address=nodes.addresses[name], run=nodes.run, key=nodes.key)
            seat = TraineeSeat(
                rank=rank,
                world_size=len(NAMES),
                meeting=f"127.0.0.1:{store.port}",
                size_bytes=size_bytes,
                directory=str(setup.directory / nodes.run),
                guards={trainee.PARITY: guard},
            )
            process = context.Process(target=trainee.serve, args=(seat, theirs))
            process.start()
            theirs.close()
            stack.callback(end, process, pipe)
            assert process.pid is not None
            found.append((process.pid, pipe))
        yield found
        for _, pipe in found:  # tell all before any exits: they need each other
            pipe.send(None)


def show(figures: Sequence[Figure], *, console: Console) -> None:
    """Print the section's table."""
    values = {figure.name: figure for figure in figures if figure.section == SECTION}
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("MiB of one node, the mean of three", no_wrap=True)
    heads = ("slots", "parity", "sidecar", "trainer", "beyond", "all", "× copies")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for name in dict.fromkeys(name.rpartition(": ")[0] for name in values):
        total = values[f"{name}: all of it"]
        table.add_row(
            name,
            *(
                f"{values[f'{name}: {what}'].value:,.1f}"
                for what in ("slots", "parity", "sidecar, PSS beyond", "trainer, PSS added")
            ),
            f"{values[f'{name}: beyond slots and parity'].value:.1f} %",
            f"{total.value:,.1f}",
            f"{total.ratio:.2f}",
        )
    console.print(table)
    console.print(
        "sidecar, trainer: what they have, or snapshots added, beside shared memory (PSS)"
    )


def readable(size_bytes: int) -> str:
    """Return a size in MiB, or in KiB if it is small."""
    return f"{size_bytes >> 20} MiB" if size_bytes >= _MIB else f"{size_bytes >> 10} KiB"
