"""A launcher of a job whose coordinator is an etcd that the job's launchers run themselves.

The launcher on the first host of the address begins it, with one member, unless the etcd is there
already; the job then begins with this launcher. The other launchers come to any of the hosts, and
the members spread over their machines (`holdfast.elastic.launch.members_keeper`). From then on no
launcher is special: the job goes on while a majority of the members is left. A member outlives its
launcher, and a launcher that is started again in the same run directory takes it up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Final

from holdfast.elastic.addresses import is_this_machine
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.coordinator.etcd.address import MANAGED, EtcdAddress
from holdfast.elastic.coordinator.managed.command import MemberAddress
from holdfast.elastic.errors import ConfigError, CoordinatorError
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.launch.joint import JointConfig, JointLauncher
from holdfast.elastic.launch.members_keeper import KeeperConfig, LauncherPresence, MembersKeeper
from holdfast.elastic.membership.view import encode
from holdfast.elastic.rendezvous.link import CoordinatorPlace, address_towards, own_address

_TOKEN: Final = "managed/token"
_ASK_S = 1.0
_HAND_OVER_S = 30.0
_LOOPBACK: Final = "127."


class ManagedLauncher(JointLauncher):
    """A `JointLauncher` that runs a member of the job's etcd; ``program`` is that of etcd."""

    def __init__(self, config: LaunchConfig, joint: JointConfig, *, program: Path) -> None:
        super().__init__(config, joint)
        self._hosts = EtcdAddress.parse(joint.place.url).endpoints
        first = self._hosts[0].rpartition(":")[0]
        self._founds = not joint.joins and founds(first, joint.host, told=joint.place.may_host)
        self._keeper_config = KeeperConfig(
            program=program,
            run_dir=self.run_dir,
            place=_place(self._hosts[0], host=joint.host or (first if self._founds else "")),
            job=joint.job,
            launchers=joint.launchers,
            return_s=0.0 if self._temporary else config.return_s,
        )
        self._keeper: MembersKeeper | None = None
        self._taken_up = False
        self._hand_over_by_s = 0.0

    # -- the beginning ---------------------------------------------------------------------------

    def _connect(self) -> None:
        try:
            super()._connect()
        except BaseException:
            if self._keeper is not None:
                self._keeper.close(forget=not self._taken_up)
            raise

    def _bind(self) -> str:
        return ""

    def _serve_others(self) -> None:
        """Take up this machine's member, find the others' etcd, or begin one."""
        keeper = self._keeper = MembersKeeper(self._keeper_config, self.key)
        deadline_s = time.monotonic() + self._joint.join_s
        self._taken_up = keeper.take_up()
        if self._taken_up:
            endpoints = tuple(dict.fromkeys((*keeper.known, *self._hosts)))
        elif found := self._patiently(self._find, deadline_s=deadline_s):
            (token,), endpoints = found, self._hosts
            keeper.follow(token)
        else:
            keeper.begin()
            endpoints = (self._keeper_config.place.endpoint,)
            self._patiently(self._publish, deadline_s=deadline_s)
        keeper.start(endpoints)
        self._joint = dataclasses.replace(
            self._joint, place=CoordinatorPlace.parse(keeper.address, may_host=False)
        )

    def _find(self) -> tuple[str, ...]:
        """Return the token of the etcd at any of the hosts; none if this launcher begins it."""
        error: CoordinatorError | None = None
        for endpoint in self._hosts:
            try:
                with contextlib.closing(
                    connect(f"{MANAGED}://{endpoint}", self.key, timeout_s=_ASK_S)
                ) as asked:
                    if entry := asked.get(_TOKEN):
                        return (entry.value,)
            except CoordinatorError as found:
                error = error or found
        if self._founds:
            return ()
        raise error or CoordinatorError(f"the etcd at {self._hosts[0]} is not ready yet")

    def _publish(self) -> bool:
        """Write the token of the etcd that this launcher began, by which the others find it."""
        keeper, endpoint = self._keeper, self._keeper_config.place.endpoint
        assert keeper is not None
        if ending := keeper.ending():
            raise ConfigError(f"the etcd that this command runs has ended: {ending}")
        url = f"{MANAGED}://{endpoint}/{keeper.token}"
        with contextlib.closing(connect(url, self.key, timeout_s=_ASK_S)) as first:
            first.put(_TOKEN, keeper.token)
        return True

    def _may_begin(self) -> bool:
        return self._founds

    def _presence_record(self) -> str:
        host = self._keeper_config.place.host
        return encode(LauncherPresence(host=host, leaving=self._hand_over_by_s > 0))

    # -- while the job runs ----------------------------------------------------------------------

    def _start_agent(self, node: NodeSpec) -> None:
        if self._keeper is not None:
            self.coordinator_address = self._keeper.address
        super()._start_agent(node)

    def _decide(self, failure: str) -> None:
        """Hand the member of this machine over before this launcher leaves."""
        keeper, presence, now_s = self._keeper, self._presence, time.monotonic()
        if keeper is not None and presence is not None and not self._hand_over_by_s:
            self._hand_over_by_s = now_s + _HAND_OVER_S
            keeper.leave()
            with contextlib.suppress(CoordinatorError):
                key = f"{self._joint.launchers}{self._number}"
                self._coordinator.put(key, self._presence_record(), lease=presence.lease)
        ended = not any(agent.alive for agent in self._agents.values())
        waits = keeper is not None and not keeper.handed_over.is_set()
        if not (ended and waits and now_s < self._hand_over_by_s):
            super()._decide(failure)

    # -- the end ---------------------------------------------------------------------------------

    def _forget_run(self) -> None:
        """End the etcd with the job, once the other launchers have read its outcome."""
        with contextlib.suppress(CoordinatorError):
            if self._over:
                self._let_others_leave()
        if self._keeper is not None:
            self._keeper.close()


def founds(first: str, host: str, *, told: bool | None) -> bool:
    """Return whether the launcher at ``host`` is on the first host, and so begins the etcd.

    ``host`` is empty if the user named none. Addresses of the loopback stand for machines.
    """
    if told is not None:
        return told
    address = own_address(first)
    if not address or not host or not address.startswith(_LOOPBACK):
        return bool(address)
    return address == own_address(host)


def _place(first: str, *, host: str) -> MemberAddress:
    """Return the address of this machine's member.

    Without a ``host`` it is that of the route to the first host. The member listens at all of the
    machine's addresses if its own is known here by another one than to the others.
    """
    name, _, port = first.rpartition(":")
    host = host or address_towards(name)
    listen, also = own_address(host), own_address(name)
    hidden = listen.startswith(_LOOPBACK) and not is_this_machine(host)
    several = bool(also) and also != listen and not listen.startswith(_LOOPBACK)
    if not listen or hidden or several:
        listen = "0.0.0.0"
    return MemberAddress(host=host, listen=listen, port=int(port))
