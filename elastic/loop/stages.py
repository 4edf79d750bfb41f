"""Stages: the decorated functions that a script calls, one after the other.

Under ``holdfast run`` every call of a decorated function is a stage of the job. All workers finish
a stage together. Then they leave its generation and form one of the next stage, which restores
nothing of the stages before. A worker that starts later calls the finished functions too: it does
not run them but gets their results from the other workers. If no other worker is left, the
functions run again, from their checkpoints if they have any.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from holdfast.ckpt.errors import PeerError, StateError
from holdfast.ckpt.state.trees.packing import pack, unpack
from holdfast.ckpt.transport import RunKey
from holdfast.ckpt.types import Json
from holdfast.elastic.channel.base import AgentChannel, Channel
from holdfast.elastic.config import Settings
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.elastic.groups.reform import GenerationWorld
from holdfast.elastic.meeting.point import MeetingPoint
from holdfast.elastic.meeting.store import MeetingStore

_log = logging.getLogger(__name__)

PART_BYTES = 1 << 20
"""The most bytes under one key, as in `StoreGather`."""

_CONNECT_S = 10.0
_FETCH_S = 120.0
_AGAIN_S = 0.1
_ROSTER_S = 5.0
_MEETINGS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStage:
    """A stage and its result as bytes; ``wrong`` is the reason if there are none."""

    name: str
    result: bytearray
    wrong: str


class Stages:
    """The stages that this process has finished, or whose results it was given.

    ``generation`` is the newest in which this process took part, 0 for none.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._finished: list[FinishedStage] = []
        self._digests: list[str] = []  # of the results that workers share
        self._places: dict[str, str] = {}
        self._is_shared = True
        self._meetings: list[MeetingPoint] = []

    @property
    def number(self) -> int:
        """The number of the present stage: of the stages before it."""
        return len(self._finished)

    def number_at(self, channel: Channel) -> int:
        """Return the number of the present stage as the job knows it.

        A script started by hand makes a job of its own of each.
        """
        return 0 if _is_alone(channel) else self.number

    def overrides(self, channel: Channel) -> dict[str, Json]:
        """Return the launcher's settings for the present stage: its disk is the first one's."""
        found = dict(channel.settings)
        snapshots = found.get("snapshots")
        if self._finished and isinstance(snapshots, dict) and snapshots.get("disk"):
            _log.warning("the launcher's disk is for the first stage; later ones spill nothing")
            found["snapshots"] = {k: v for k, v in snapshots.items() if not k.startswith("disk")}
        return found

    def is_over(self, channel: Channel) -> bool:
        """Return whether the job has completed the present stage without this process."""
        if not isinstance(channel, AgentChannel):
            return False
        channel.await_roster(after=0, timeout_s=_ROSTER_S)
        return bool(channel.roster().in_stages_after(self.number))

    def begin(self, name: str, settings: Settings, channel: Channel) -> None:
        """Begin a stage. Raises ``ConfigError`` if it cannot follow those before it.

        A script started by hand may call the same function again: it goes on from its checkpoint.
        """
        alone = _is_alone(channel)
        for place in _places(settings):
            before = self._places.get(place)
            if before is not None and not (alone and before == name):
                raise ConfigError(
                    f"{name} and {before}, which is complete, have the same directory {place}: "
                    f"{name} would begin with the end of {before}; give each its own"
                )
        if self._finished and settings.snapshots.disk and not alone:
            raise ConfigError(
                f"{name} follows {self._finished[-1].name} in the same script, with "
                f"Snapshots(disk={settings.snapshots.disk!r}): only the first stage can have a "
                "disk; leave it out, or use checkpoint="
            )
        self._is_shared = isinstance(channel, AgentChannel)
        if self._is_shared:
            self._check_results()

    def finished(self, name: str, result: Any, settings: Settings) -> None:
        """Note the end of the present stage, and its result as it is now.

        The script may change it before the next stage, in a worker that starts later as well.
        """
        self._places.update(dict.fromkeys(_places(settings), name))
        packed, wrong = bytearray(), ""
        if self._is_shared:  # another launcher restarts all workers at once
            try:
                packed = pack(result, "the result")
            except StateError as error:  # the last stage may return anything
                wrong = str(error)
        self._finished.append(FinishedStage(name=name, result=packed, wrong=wrong))

    def _check_results(self) -> None:
        for before in self._finished[len(self._digests) :]:
            if before.wrong:
                raise ConfigError(
                    f"a second decorated function follows {before.name}, but {before.wrong}: a "
                    "worker that starts later could not get it; return dense tensors, numbers, "
                    "strings, and lists and dicts of them (of a module its state_dict()), or "
                    "nothing"
                )
            self._digests.append(hashlib.sha256(before.result).hexdigest())

    def publish(self, meeting: MeetingPoint) -> None:
        """Offer the results of the stages before to workers that start later.

        The place of the stage before stays too: slower ranks may still read there.
        """
        self._meetings.append(meeting)
        while len(self._meetings) > _MEETINGS:
            self._meetings.pop(0).close()
        for stage, _ in enumerate(self._digests):
            data = self._finished[stage].result
            parts = range(0, len(data), PART_BYTES)
            for i, at in enumerate(parts):
                meeting.set(f"stage/{stage}/{i}", bytes(data[at : at + PART_BYTES]))
            meeting.set(f"stage/{stage}", str(len(parts)).encode())

    def leave(self, channel: Channel) -> None:
        """End what serves other ranks, if there are none: the process goes on without Holdfast."""
        if _is_alone(channel):
            while self._meetings:
                self._meetings.pop().close()

    def agree(self, world: GenerationWorld) -> None:
        """Refuse results of the stages before that differ between ranks; collective."""
        if not self._digests or world.size == 1:
            return
        said = world.gather(list(self._digests))
        for rank, theirs in enumerate(said):
            for before, mine, other in zip(self._finished, said[0], theirs, strict=True):
                if mine != other:
                    raise ConfigError(
                        f"{before.name} returned something else on rank {rank} than on rank 0: a "
                        "worker that starts later could not know which it gets; return the same on "
                        "all"
                    )

    def fetch(self, channel: Channel) -> Any:
        """Return the result of the present stage, which the job has finished, from others.

        Raises ``JobFailedError`` if no worker has it.
        """
        until_s = time.monotonic() + _FETCH_S
        while time.monotonic() < until_s and not channel.stopped():
            for worker in channel.roster().in_stages_after(self.number):
                try:
                    data = _read(str(worker.info.get("store", "")), channel.key, self.number)
                except PeerError:
                    continue
                return unpack(data)
            channel.await_roster(after=channel.roster_version(), timeout_s=_AGAIN_S)
        raise JobFailedError(
            f"the job is in a later stage, and no worker gave the result of stage {self.number}"
        )


def _is_alone(channel: Channel) -> bool:
    """Return whether the script was started by hand, as one process."""
    if isinstance(channel, AgentChannel):
        return False  # and does without the import
    from holdfast.elastic.channel.solo import SoloChannel

    return isinstance(channel, SoloChannel)


def _places(settings: Settings) -> list[str]:
    """Return the directories from which a function continues when it is called again."""
    root = settings.checkpoint.root if settings.checkpoint else None
    return [place for place in (root, settings.snapshots.disk) if place]


def _read(address: str, key: RunKey, stage: int) -> bytearray:
    """Return a stage's result from a worker's store. Raises ``PeerError``."""
    limit = timedelta(seconds=_CONNECT_S)
    store = MeetingStore(address, key, timeout=limit, answer_s=_CONNECT_S)
    try:
        count = int(store.get(f"stage/{stage}"))
        return bytearray().join(store.get(f"stage/{stage}/{i}") for i in range(count))
    finally:
        store.close()
