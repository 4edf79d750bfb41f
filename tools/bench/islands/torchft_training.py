"""A replica of the benchmark's model under torchft's streaming DiLoCo, as far apart as islands.

With ``--serve`` it is the lighthouse instead, through which the replicas meet.
"""

from __future__ import annotations

import argparse
import importlib
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import nn

from holdfast.ckpt.torch_private import TCPStore
from holdfast.tools.bench.islands.learner import (
    RATE,
    WIDTH,
    SmallGPT,
    Windows,
    held_out,
    learner,
    parameters_of,
)
from holdfast.tools.bench.islands.outcome import LineBytes, Outcome, WindowClock

EVERY, FRAGMENTS, DELAY = 40, 4, 5
"""As those of `holdfast.Islands`: steps to a sync of all, parts in turn, steps meanwhile."""

_TIMEOUT: Final = timedelta(seconds=300)
_END_S: Final = 300.0
_POLL_S: Final = 0.05


def serve(args: argparse.Namespace) -> None:
    """Run the lighthouse, and write its address to the file ``--result``."""
    coordination = importlib.import_module("torchft.coordination")
    server = coordination.LighthouseServer(bind=f"{args.host}:0", min_replicas=args.world)
    port = server.address().rpartition(":")[2]
    fresh = Path(args.result).with_suffix(".fresh")
    fresh.write_text(f"http://{args.host}:{port}")
    fresh.rename(args.result)
    threading.Event().wait()


def fragments_of(model: SmallGPT) -> list[nn.ModuleList]:
    """Return the parts that are synchronised in turn: a block each, the first with all the rest."""
    rest = [model.token, model.place, model.head]
    return [
        nn.ModuleList([block, *(rest if number == 0 else ())])
        for number, block in enumerate(model.blocks)
    ]


def main(args: argparse.Namespace) -> None:
    """Train ``args.steps`` steps after a first one that is not measured; write the outcome."""
    data = Windows()
    model, inner = learner(args.seed, rate=args.rate, width=args.width)
    parts = fragments_of(model)
    outer = [
        torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts
    ]
    store = TCPStore(args.host, 0, is_master=True, wait_for_workers=False)
    manager = _manager(args, model, inner, store_port=store.port)
    generator = torch.Generator().manual_seed(args.rank + 1 + args.world * args.seed)
    diloco = importlib.import_module("torchft.local_sgd").DiLoCo(
        manager, parts, inner, outer, sync_every=EVERY, fragment_sync_delay=DELAY
    )
    synced = 0
    with diloco:
        for step in range(args.steps + 1):
            chosen = torch.randint(len(data), (args.samples,), generator=generator).tolist()
            loss = model(torch.stack([data[number] for number in chosen]))
            loss.backward()
            inner.step()
            inner.zero_grad()
            if step == 0:
                clock, synced = WindowClock(args.device), manager.current_step()
        window = clock.window(args.steps)
    _take_global(diloco, parts)
    parameters = parameters_of(model)
    elements = parameters * (manager.current_step() - synced) // FRAGMENTS
    nbytes = 4 * elements * 2 * (args.world - 1) // args.world
    found = Outcome(
        window=window,
        parameters=parameters,
        held_out=held_out(model),
        content=LineBytes(nbytes, nbytes),
    )
    Path(args.result).write_bytes(msgspec.json.encode(found))
    _await_others(Path(args.result).parent, args.world)
    manager.shutdown(wait=False)


def _manager(
    args: argparse.Namespace, model: nn.Module, inner: torch.optim.Optimizer, *, store_port: int
) -> Any:
    """Return torchft's manager; the store at ``store_port`` must live as long."""
    gloo = importlib.import_module("torchft.process_group").ProcessGroupGloo

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    return importlib.import_module("torchft.manager").Manager(
        pg=gloo(timeout=_TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=args.world,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=args.host,
        store_port=store_port,
        lighthouse_addr=args.lighthouse,
        replica_id=f"replica_{args.rank}",
        hostname=args.host,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        init_sync=False,  # all begin with the same weights
    )


@torch.no_grad()
def _take_global(diloco: Any, parts: list[nn.ModuleList]) -> None:
    """Take the weights of the last synchronisation, as an island takes the sea's."""
    for part, fragment in zip(parts, diloco._fragments, strict=True):
        for name, parameter in part.named_parameters():
            parameter.copy_(fragment.original_parameters[name])


def _await_others(directory: Path, count: int) -> None:
    """Stay until all have written their outcomes: they need this replica until then."""
    until_s = time.monotonic() + _END_S
    while len(list(directory.glob("*.json"))) < count and time.monotonic() < until_s:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--host", required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--result", required=True)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--device", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--width", type=int, default=WIDTH)
    arguments = parser.parse_args()
    (serve if arguments.serve else main)(arguments)
