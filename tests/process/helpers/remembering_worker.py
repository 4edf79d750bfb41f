"""A worker without torch that snapshots every step and checks every restored snapshot.

It counts steps in memory only: steps that the sidecars cannot restore, it repeats. ``--bytes`` is
the length of a rank's payload, ``--grow`` its growth per step, ``--memory`` the declared budget of
a node.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # `doubles`, when this file runs as a program

from doubles.blocks import random_payload, write_block

from holdfast.ckpt.errors import BudgetError, CapacityError, CkptError, GivenUpError
from holdfast.ckpt.memory.arena import SlotFile
from holdfast.ckpt.sidecar.client import SidecarClient
from holdfast.ckpt.types import Json
from holdfast.elastic.channel.base import Channel, WorkerPhase
from holdfast.elastic.channel.connecting import connect
from holdfast.elastic.errors import Stopped
from holdfast.elastic.events import StepDone, TrainingResumed, UserEvent
from holdfast.elastic.membership.records import GenerationRecord, JobSpec


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--progress")  # what every worker of a test job is given
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=0.02)
    parser.add_argument("--bytes", type=int, default=30_000)
    parser.add_argument("--grow", type=int, default=0)
    parser.add_argument("--memory", type=int, default=0)
    args = parser.parse_args()
    channel = connect()
    client = SidecarClient(channel.sidecar, channel.key)
    after, spec = 0, JobSpec(parity=1, memory_bytes=args.memory)
    try:
        while True:
            channel.ready(after=after, spec=spec, info={"store": "nowhere"})
            record = channel.await_generation(after=after)
            after = record.number
            if _run_generation(channel, client, record, args):
                channel.done({"steps": args.steps})
                return 0
            client.close()
            client = SidecarClient(channel.sidecar, channel.key)
    except Stopped:
        return 0


def _run_generation(
    channel: Channel, client: SidecarClient, record: GenerationRecord, args: argparse.Namespace
) -> bool:
    number = record.number
    rank = next(m.rank for m in record.members if m.incarnation == channel.incarnation)
    try:
        step = _restore(channel, client, record, rank=rank)
        channel.emit(TrainingResumed(generation=number, step=step))
        while step < args.steps:
            if channel.fenced(number):
                return False
            channel.beat(step=step, phase=WorkerPhase.COMPUTE)
            time.sleep(args.seconds)
            step += 1
            nbytes = args.bytes + step * args.grow
            try:
                write_block(
                    client, record.snapshots, step=step, rank=rank, nbytes=nbytes, timeout_s=0.2
                )
            except BudgetError:
                raise
            except (CapacityError, GivenUpError):
                continue  # it is left out
            protected = client.protected_step(generation=number)
            channel.emit(StepDone(step=step, generation=number, rank=rank, protected=protected))
    except BudgetError as error:
        channel.fail(str(error), user_error=True)
        raise
    except CkptError as error:
        fields: dict[str, Json] = {"generation": number, "rank": rank, "error": str(error)}
        channel.emit(UserEvent(name="interrupted", fields=fields))
        while not channel.fenced(number):
            time.sleep(0.01)
        return False
    channel.beat(step=step, phase=WorkerPhase.IDLE)
    return not channel.fenced(number)


def _restore(
    channel: Channel, client: SidecarClient, record: GenerationRecord, *, rank: int
) -> int:
    """Return the step begun from, its block of ``rank`` compared byte for byte."""
    if (point := record.restore) is None:
        return 0
    source = next(each for each in point.sources if each.rank == rank % len(point.sources))
    nodes = {peer.node: peer.address for peer in record.snapshots.peers}
    reader = SidecarClient(nodes[source.node], channel.key)
    handle = reader.open_block(point.world, point.step, source)
    slot = SlotFile.open(handle.path)
    seed = (point.world.generation, point.step, source.rank)
    wanted = random_payload(handle.payload_bytes, seed=seed)
    assert bytes(slot.block(handle.payload_bytes)) == wanted, "the block is not what was written"
    slot.close()
    reader.close()
    return point.step


if __name__ == "__main__":
    sys.exit(main())
