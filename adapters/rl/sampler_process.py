"""User-written sampling processes, beside a user-written training loop.

A process, started in any way, `attach`es to the loop by a directory. It gets samples and the
weights to sample them with, and adds tokens to them. When `Sample.extend` returns, the tokens are
in a log with copies on other nodes; if the process dies, another one continues. A process may come
and go at any time, and stays while the loop's ranks are replaced. `Rollouts.serve` is the other
side.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from torch import Tensor

from holdfast.adapters.rl.rollout.engine import unlogged
from holdfast.adapters.rl.rollout.episode import Episode
from holdfast.adapters.rl.rollout.sampling_client import RETRY_S, SamplingClient
from holdfast.adapters.rl.samples.sample import Sample
from holdfast.adapters.rl.samples.trajectory import Delta, SampleId, Trajectory, TurnLimits
from holdfast.adapters.rl.samples.unlogged import Unlogged
from holdfast.adapters.rl.server.meeting import Meeting, Offer
from holdfast.elastic.channel.base import WorkerPhase
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.elastic.events import Event
from holdfast.elastic.membership.records import Roster

__all__ = ["Sample", "Sampler", "attach"]

_log = logging.getLogger(__name__)

_PART_LIMIT_S = 2.0


def attach(
    directory: str | Path,
    load: Callable[[Mapping[str, Tensor]], Any],
    *,
    node: str | None = None,
    log_every_tokens: int = 1,
    wait_s: float = 120.0,
) -> Sampler:
    """Attach to the loop that serves ``directory``; wait for it.

    ``load`` is called with the weights (name → whole tensor) of each policy version that is to
    sample, and must copy them: `nn.Module.load_state_dict`, or an engine's equivalent. Only
    `Sampler.take` and `Sampler.samples` call it. ``node`` names the node whose sidecar has the log;
    give it where nodes are machines, so that it is this process's own node. A loss of the process
    costs the tokens since the last ``log_every_tokens``. Raises ``JobFailedError`` when the
    directory is not served for ``wait_s``, here and in those calls.
    """
    if log_every_tokens < 1:
        raise ConfigError(f"log_every_tokens is {log_every_tokens}, needed: at least 1")
    place = _SamplerPlace(Meeting(directory), directory, node=node, wait_s=wait_s)
    return Sampler(place, load, every=log_every_tokens)


class _SamplerPlace:
    """The position of a sampler in the job, from the offers (see `sampling_client.Host`)."""

    def __init__(
        self, meeting: Meeting, directory: str | Path, *, node: str | None, wait_s: float
    ) -> None:
        self._meeting, self._directory, self._wait_s = meeting, directory, wait_s
        self._led_s = time.monotonic()
        self.is_leaving = False
        self.first = self._await_offer()
        self.key, self.seat = meeting.key(), f"sampler/{os.getpid()}"
        nodes = [peer.node for peer in self.first.generation.snapshots.peers]
        if node is not None and node not in nodes:
            raise ConfigError(f"node {node!r} is not one of the job's: {', '.join(nodes)}")
        self.incarnation = uuid.uuid4().hex
        self.node = node or self._some(self.first)
        self._lock = meeting.join(self.incarnation)
        self._offer, self._roster = self.first, _roster(self.first)

    def _await_offer(self) -> Offer:
        while True:
            self.require_leader()
            offer = self._meeting.offer() if self._meeting.led() else None
            if offer is not None and not offer.over:
                return offer
            time.sleep(RETRY_S)

    def require_leader(self) -> None:
        """Raise ``JobFailedError`` if there was no leader for too long."""
        now_s = time.monotonic()
        if self._meeting.led():
            self._led_s = now_s
        elif now_s > self._led_s + self._wait_s:
            raise JobFailedError(
                f"{self._directory}: no loop has served it for {self._wait_s:.0f} s; start the "
                "loop, or attach to the directory that it gives to Rollouts.serve"
            )

    def _some(self, offer: Offer) -> str:
        """Return one of the nodes, evenly over samplers."""
        peers = offer.generation.snapshots.peers
        return peers[zlib.crc32(self.incarnation.encode()) % len(peers)].node

    @property
    def over(self) -> bool:
        """True if there is nothing more to do: the job ended, or another took its place."""
        offer = self._meeting.offer() or self._offer
        return offer.over or offer.run != self.first.run

    @property
    def sidecar(self) -> str:
        """Address of the node's sidecar."""
        peers = self._offer.generation.snapshots.peers
        return next(peer.address for peer in peers if peer.node == self.node)

    def roster(self) -> Roster:
        """Return the newest generation that was offered.

        If the node is no longer in it, this sampler becomes a new one on another node; its old log
        belongs to its old incarnation.
        """
        offer = self._meeting.offer()
        if offer is not None and offer is not self._offer and offer.run == self.first.run:
            if self.node not in [peer.node for peer in offer.generation.snapshots.peers]:
                self.incarnation = uuid.uuid4().hex
                self.node, before = self._some(offer), self._lock
                self._lock = self._meeting.join(self.incarnation)
                before.release()
            self._offer, self._roster = offer, _roster(offer)
        return self._roster

    def leaving(self) -> bool:
        """Say whether the sampler was told to close."""
        return self.is_leaving

    def handed_over(self, *, generation: int, step: int) -> None:
        """Do nothing: no controller waits for it."""

    def beat(self, *, step: int, phase: WorkerPhase) -> None:
        """Do nothing: others see its death by its lock."""

    def emit(self, event: Event) -> None:
        """Write the event to the debug log."""
        _log.debug("%s: %s", self.seat, event)

    def close(self) -> None:
        """Release the lock, by which others see that it is gone."""
        self._lock.release()


def _roster(offer: Offer) -> Roster:
    """Return the generation with the address at which its rank 0 serves samplers."""
    record = offer.generation
    first, *others = record.members
    first = msgspec.structs.replace(first, info={"rollout": offer.leader})
    return Roster(generation=msgspec.structs.replace(record, members=(first, *others)))


class _Hand:
    """Samples that are at work somewhere in the loop's own code (see `sampling_client.Work`).

    ``wanted`` more are asked for at the moment. Only then weights change, or while it ``renews``.
    """

    def __init__(
        self,
        make: Callable[[Trajectory, int], Sample],
        load: Callable[[Mapping[str, Tensor]], Any],
        *,
        pinned: bool,
        unlogged: Unlogged,
    ) -> None:
        self._make, self._load, self.pinned = make, load, pinned
        self._unlogged = unlogged
        self._samples: dict[SampleId, Sample] = {}
        self._arrived: list[Sample] = []
        self.wanted, self.generation = 0, 0
        self.renews = False
        self.version: int | None = None

    @property
    def renewable(self) -> bool:
        """True if newer weights may be loaded now."""
        return not self.pinned and (self.wanted > 0 or self.renews)

    @property
    def slots(self) -> int:
        """Number of samples asked for at a time."""
        return max(1, self.wanted)

    @property
    def free(self) -> int:
        """Number of samples still asked for."""
        return self.wanted

    @property
    def idle(self) -> bool:
        """True if no sample is in progress."""
        return not self._samples

    def load(self, weights: Mapping[str, Tensor], *, version: int, generation: int) -> None:
        """Give the loop's code the weights of a policy version."""
        if self.pinned and not self.idle:
            raise RuntimeError(f"version {version} offered while version {self.version} is in use")
        self._load(weights)
        self.version, self.generation = version, generation
        for sample in self._samples.values():
            sample.version = version

    def unload(self) -> None:
        """Give up all samples; the weights are void."""
        self.drop({*self._samples})
        self._unlogged.take()
        self.version = None

    def put(self, trajectory: Trajectory) -> None:
        """Give the loop's code a sample, and log its beginning."""
        assert self.version is not None
        sample = self._make(trajectory, self.version)
        self._samples[trajectory.key] = sample
        self._arrived.append(sample)
        if trajectory.tokens:
            self._unlogged.keep(unlogged(trajectory, (0, 0)))

    def arrivals(self) -> list[Sample]:
        """Return, once, the samples that were put and are still wanted."""
        arrived, self._arrived = self._arrived, []
        return [sample for sample in arrived if not sample.given_up]

    def remove(self, sample: Sample) -> None:
        """Forget a finished sample."""
        self._samples.pop((sample.ordinal, sample.sample), None)

    def running(self) -> list[Trajectory]:
        """Return the trajectories in progress, as they are now."""
        return [sample.trajectory() for sample in self._samples.values()]

    def progress(self) -> dict[SampleId, int]:
        """Return the number of sampled tokens of each sample."""
        return {key: sample.sampled for key, sample in self._samples.items()}

    def oldest(self) -> dict[SampleId, int]:
        """Return the oldest version of each sample's tokens, future ones included."""
        version = self.version or 0
        return {
            each.key: version if each.oldest is None else each.oldest for each in self.running()
        }

    def drop(self, keys: set[SampleId]) -> None:
        """Give up these samples."""
        for key in keys & self._samples.keys():
            self._samples.pop(key).give_up()

    def take_deltas(self) -> list[Delta]:
        """Return, once, the deltas that are not in the log yet."""
        return self._unlogged.take()


class Sampler:
    """One process's part in sampling, for one thread; a context manager that closes it.

    ``version`` is the weights' number of trained steps.
    """

    def __init__(
        self, place: _SamplerPlace, load: Callable[[Mapping[str, Tensor]], Any], *, every: int
    ) -> None:
        offer = place.first
        self._place, self._plan, self._seed = place, offer.plan, offer.seed
        self._policies = offer.policies or ("",)
        self._unlogged = Unlogged(every, self._log)
        self._hand = _Hand(self._make, load, pinned=offer.plan.pinned, unlogged=self._unlogged)
        self._client = SamplingClient(
            place, self._hand, offer.names, stopped=lambda: place.over, frozen=None
        )

    def _make(self, start: Trajectory, version: int) -> Sample:
        if self.limits.turns:
            return Episode(self, start, version=version, policies=self._policies)
        return Sample(self, start, version=version)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def version(self) -> int | None:
        """Policy version of the weights that were loaded last; None before the first."""
        return self._hand.version

    @property
    def over(self) -> bool:
        """True if nothing more is to be sampled: the loop has made its last step."""
        return self._client.over or self._place.over

    def samples(self) -> Iterator[Sample]:
        """Yield one sample after another, until the loop is over; each has to be finished."""
        while taken := self.take():
            yield taken[0]
            if not taken[0].finished:
                raise ConfigError("finish a sample before the next one, or take() several")

    def take(self, count: int = 1) -> list[Sample]:
        """Return up to ``count`` samples to start or to continue, the most urgent first.

        With no sample in progress it waits for some, and returns none only when the loop is `over`.
        Otherwise it returns at once, for samplers that keep many in progress. New weights may be
        loaded meanwhile; in mode ``BOUNDED`` also while samples are in progress, which continue
        under them: their key-value caches must then be filled again (see `version`).
        """
        if count < 1:
            raise ConfigError(f"count is {count}, needed: at least 1")
        hand = self._hand
        hand.wanted = count
        try:
            if not hand.idle:
                self._client.attend(at_once=True)
            while hand.idle and not self.over:
                self._place.require_leader()
                self._client.attend()
                if hand.idle:
                    time.sleep(RETRY_S)
        finally:
            hand.wanted = 0
        return hand.arrivals()

    @property
    def pinned(self) -> bool:
        """True if each sample is of one version: in every mode but ``BOUNDED``."""
        return self._hand.pinned

    def renew(self) -> list[Sample]:
        """Take part in the loop's exchange, and in mode ``BOUNDED`` load newer weights, if any.

        It returns samples that were left over from a `take` before, mostly none.
        """
        hand = self._hand
        hand.renews = True
        try:
            self._client.attend(at_once=True)
        finally:
            hand.renews = False
        return hand.arrivals()

    def close(self) -> None:
        """Hand the samples in progress to others, and end."""
        client, deadline_s = self._client, time.monotonic() + _PART_LIMIT_S
        client.log(self._hand.take_deltas())
        self._place.is_leaving = True
        while not (self.over or client.parted) and time.monotonic() < deadline_s:
            client.attend()
        client.close()
        self._place.close()

    # -- a sample's side -------------------------------------------------------------------------

    @property
    def limits(self) -> TurnLimits:
        """The limits that end an answer: the plan's."""
        return self._plan.limits

    @property
    def seed(self) -> int:
        """Seed of the noise that picks tokens: the run's."""
        return self._seed

    @property
    def generation(self) -> int:
        """Generation in which the weights were pulled."""
        return self._hand.generation

    def added(self, sample: Sample, delta: Delta) -> None:
        """Log tokens added to a sample, with earlier unlogged ones; deliver a finished sample."""
        if sample.finished:
            self._hand.remove(sample)
            self._client.finish(sample.trajectory())
        self._unlogged.add(delta, finished=sample.finished or bool(delta.turns))
        self._client.attend()

    def _log(self, deltas: list[Delta]) -> None:
        self._client.log(deltas)

    def together(self) -> AbstractContextManager[None]:
        """Return a block whose tokens are logged at its end, by one record."""
        return self._unlogged.together()
