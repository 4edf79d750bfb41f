"""Follows a job: reads its events as they appear, and asks its nodes and its coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from holdfast.ckpt.errors import HoldfastError
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.agent.reporting import NodeProcesses
from holdfast.tools.live.asking import ask_all, sidecars
from holdfast.tools.live.directories import RunDirectories
from holdfast.tools.live.fold import Fold
from holdfast.tools.live.members.overlay import overlay
from holdfast.tools.live.members.reader import MembersReader
from holdfast.tools.live.view import RunView
from holdfast.tools.show.node_status import NodeStatus

_OVER = ("done", "failed")


class Follower:
    """Reads a job as it goes, writes nothing, and takes no part in it.

    ``run_dirs`` are the directories of its launchers, ``members`` reads its coordinator; there is
    one or the other, or both. `read` and `ask` may be called from two threads, each from one.

    Raises ``NotFoundError`` if a directory is not there, or has no events of a run, and
    ``ConfigError`` for directories of different jobs.
    """

    def __init__(
        self,
        *run_dirs: Path,
        members: MembersReader | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._directories, self._members, self._now = RunDirectories(run_dirs), members, now
        self.run_dirs = self._directories.paths
        self.fold = Fold()
        self.statuses: Mapping[str, NodeStatus] = {}
        self.silence = ""

    def close(self) -> None:
        """Stop following the coordinator."""
        if self._members is not None:
            self._members.close()

    @property
    def damaged(self) -> int:
        """The number of lines that are no events."""
        return self._directories.damaged

    @property
    def place(self) -> str:
        """The directories and the coordinator, as words."""
        named = [self._members.address] if self._members else []
        return " and ".join([*map(str, self.run_dirs), *named])

    def read(self) -> int:
        """Take over the events that appeared, up to a bound; return how many there were."""
        count = 0
        for events in self._directories.new(confirmed=self._may_be_over()):
            self.fold.apply(events)
            count += len(events)
        return count

    def _may_be_over(self) -> bool:
        """Say whether the coordinator does not say that nodes of the job go on."""
        members = self._members
        return members is None or bool(members.silence) or members.over

    def ask(self) -> None:
        """Ask the nodes for their status; ``silence`` says why there is no answer at all."""
        if self._members is not None:
            self._members.ask()
        try:
            found = ask_all(self.run_dirs, key=self._key(), members=self._listed())
            self.statuses, self.silence = {node.node: node for node in found}, ""
        except (HoldfastError, OSError, ValueError) as error:
            self.statuses, self.silence = {}, str(error)
        if self._members is not None and self._members.silence:
            self.silence = self._members.silence

    def sidecars(self) -> tuple[RunKey, dict[str, NodeProcesses]]:
        """Return the job's key, and the processes of its nodes. Raises ``NotFoundError``."""
        return sidecars(self.run_dirs, key=self._key(), members=self._listed())

    def _key(self) -> RunKey | None:
        return self._members.key if self._members else None

    def _listed(self) -> dict[str, NodeProcesses] | None:
        """Return the nodes by the coordinator's records; None if it cannot be asked."""
        members = self._members
        if members is None or (members.silence and self.run_dirs):
            return None
        return members.listed()

    def view(self) -> RunView:
        """Return the job as it is now."""
        view = self.fold.view(now_s=self._now(), statuses=self.statuses, damaged=self.damaged)
        members = self._members
        if members is None or (members.silence and self.run_dirs):
            return view
        found = overlay(view, members.roll(), heard=self.fold.heard(), since_s=members.since_s)
        answers = not members.silence or any(node.status for node in self.statuses.values())
        if answers or found.state in _OVER:
            return found
        return msgspec.structs.replace(found, state="silent")
