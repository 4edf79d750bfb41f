"""The messages between rollout workers and the trainer's rollout server.

In an ``exchange`` a worker reports what it holds, delivers what it finished and asks for work; the
answer is the server's view. An exchange is also heartbeat and announcement, so a new server learns
everything from the first one. ``digest`` asks for the published digest of a policy version's
weights.
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
    """A worker's message to the server.

    - ``generation``: the generation whose rank 0 the message is for.
    - ``finished``: complete samples; ``again``: they were sent before, to another server.
    - ``left``: work in progress when the worker had to drop its weights, or everything.
    - ``set_aside``: samples that the worker stopped because the server asked for it.
    - ``running``: (ordinal, sample, number of sampled tokens) of each sample in progress.
    - ``oldest``: for each entry of ``running``, the oldest version of its tokens.
    - ``free``: number of samples the worker can take.
    - ``version`` of ``loaded_in`` (a generation): the worker's weights, None before the first.
    - ``full``: the worker holds as many tokens as it may.
    - ``leaving``: the worker hands over everything that is not released, and ends.
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
    """The server's answer.

    - ``leading``: this is rank 0 of the generation meant; if not, all else is void.
    - ``abandon``: samples to stop working on.
    - ``reload``: the worker's weights belong to a rolled-back future; its work in progress is void.
    - ``released``: lower ordinals are trained and protected, and need not be kept.
    - ``over``: no more work will come.
    - ``set_aside``: samples to stop and to hand in unfinished.
    - ``allowance``: the worker asks again after this many tokens; None: at any time.
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
    """The digest of `weights.published`; empty, with the reason, if there is none.

    ``leading`` as in `Answer`.
    """

    leading: bool
    digest: str = ""
    why: str = ""


learn(globals())
