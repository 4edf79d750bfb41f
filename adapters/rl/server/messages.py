"""What rollout workers and the trainer's rollout server say to each other.

In an ``exchange`` a worker says what it holds, hands in what it finished and asks for work; the
answer is the server's view. It is its own heartbeat and announcement, so a new server learns
everything from the first exchange. ``digest`` asks what the weights of a policy version must be.
"""

from __future__ import annotations

import msgspec

from holdfast.adapters.rl.ledger.plan import Assignment
from holdfast.adapters.rl.samples.trajectory import SampleId, Trajectory
from holdfast.adapters.rl.weights.places import WeightsPlace
from holdfast.ckpt.types import learn

EXCHANGE = "exchange"
DIGEST = "digest"


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout worker: its seat, its process's incarnation, and the node that has its log."""

    seat: str
    incarnation: str
    node: str

    @property
    def log(self) -> str:
        """Name of its record log."""
        return f"{self.seat.replace('/', '-')}-{self.incarnation}"


class WorkerExchange(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's side.

    ``generation`` is whose rank 0 it means to talk to; ``running`` has the number of sampled
    tokens of each sample at work; ``version`` of ``loaded_in`` (a generation) are its weights, None
    before the first; ``again`` marks ``finished`` samples that were sent before, to another server;
    ``left`` is what it was at work on when it had to let go of its weights, or of everything;
    ``set_aside`` what it stopped at because it was told to. ``oldest`` goes with ``running``: the
    oldest version of each one's tokens. ``full``: it holds as many tokens as it may. ``leaving``:
    with this it hands over everything that is not released, and ends.
    """

    worker: WorkerIdentity
    generation: int
    finished: tuple[Trajectory, ...] = ()
    again: bool = False
    left: tuple[Trajectory, ...] = ()
    set_aside: tuple[Trajectory, ...] = ()
    running: tuple[tuple[int, int, int], ...] = ()
    oldest: tuple[int, ...] = ()
    free: int = 0
    version: int | None = None
    loaded_in: int = 0
    full: bool = False
    leaving: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The server's side.

    ``leading``: this is rank 0 of the generation meant; all else is void when it is not.
    ``abandon``: samples to stop working on; ``reload``: the worker's weights belong to a
    rolled-back future, everything at work with them is void; ordinals below ``released`` are
    trained and protected, nothing of them needs to be kept; ``over``: no work will come.
    ``set_aside``: samples to stop at and to hand in as they stand; after ``allowance`` tokens the
    worker asks again, None: in its own time.
    """

    leading: bool
    work: tuple[Assignment, ...] = ()
    abandon: tuple[SampleId, ...] = ()
    reload: bool = False
    released: int = 0
    over: bool = False
    set_aside: tuple[SampleId, ...] = ()
    allowance: int | None = None


class AskDigest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks the leader of ``generation`` for the digest of the weights at a place."""

    generation: int
    place: WeightsPlace


class ToldDigest(msgspec.Struct, frozen=True, kw_only=True):
    """The digest of `weights.published`; empty, with the reason, where there is none to be told.

    ``leading`` as in `Answer`.
    """

    leading: bool
    digest: str = ""
    why: str = ""


learn(globals())
