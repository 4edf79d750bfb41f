"""Finds a job at a coordinator: by the name that its launchers share, or by its run."""

from __future__ import annotations

from typing import Final

from holdfast.ckpt.errors import NotFoundError, PeerError
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.channel.shared_key import shared_key_file
from holdfast.elastic.coordinator.base import Coordinator, Entry
from holdfast.elastic.coordinator.connecting import connect
from holdfast.elastic.errors import ConfigError, CoordinatorError
from holdfast.elastic.launch.joint import SharedJobRecord
from holdfast.elastic.membership.view import decode, run_prefix
from holdfast.elastic.rendezvous.link import CoordinatorPlace

TIMEOUT_S: Final = 3.0
"""The time that the coordinator has for an answer."""

_JOBS, _RECORD = "jobs/", "/record"
_NO_RUNS: Final = ("jobs", "launchers", "managed", "torchrun")
_OF_RUNS: Final = ("generation", "seating", "nodes")
_SHOWN: Final = 8


def key_at(given: str | None) -> RunKey:
    """Return the key that admits to a job, of the file that launchers use unless one is given.

    Raises ``ConfigError`` if there is none; unlike a launcher, a reader makes none.
    """
    path = shared_key_file(given)
    try:
        return RunKey.load(path)
    except PeerError as error:
        raise ConfigError(
            f"{error}; give --key-file the file that the job's launchers have, or the key.json of "
            "its run directory"
        ) from error


def reach(address: str, key: RunKey) -> Coordinator:
    """Return a connection to the coordinator at ``HOST[:PORT]`` or an etcd's URL.

    Raises ``ConfigError`` for an address that is none.
    """
    text = address.removeprefix("tcp://")
    return connect(CoordinatorPlace.parse(text, may_host=False).url, key, timeout_s=TIMEOUT_S)


def find(coordinator: Coordinator, *, job: str | None) -> tuple[str, dict[str, int]]:
    """Return the run of a job, and the number of its workers by role, if that is recorded.

    ``job`` is the name that its launchers were given, or the name of a run; None: the only one.
    Raises ``NotFoundError`` if there is none, or several.
    """
    if job is not None:
        return _named(coordinator, job)
    shared = _shared(coordinator)
    running = {name: record for name, record in shared.items() if not record.ended}
    lone = _runs(coordinator) - {record.run for record in shared.values()}
    names = [*running, *sorted(lone)]
    if len(names) > 1:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise NotFoundError(
            f"the coordinator has {len(names)} jobs: {', '.join(names[:_SHOWN])}{more}; name one "
            "with --job"
        )
    if not names:
        ended = f"; the job {', '.join(shared)} is over" if shared else ""
        raise NotFoundError(
            f"the coordinator has no job{ended}; a job that torchrun starts keeps no records there"
        )
    record = running.get(names[0])
    return (record.run, dict(record.wanted)) if record else (names[0], {})


def _named(coordinator: Coordinator, job: str) -> tuple[str, dict[str, int]]:
    entry = coordinator.get(f"{_JOBS}{job}{_RECORD}")
    if entry is not None:
        record = _decoded(entry)
        return record.run, dict(record.wanted)
    if coordinator.range(run_prefix(job))[0]:
        return job, {}
    known = [*_shared(coordinator), *sorted(_runs(coordinator))][:_SHOWN]
    there = f"; there is {', '.join(known)}" if known else "; it has none"
    raise NotFoundError(f"the coordinator has no job {job}{there}")


def _shared(coordinator: Coordinator) -> dict[str, SharedJobRecord]:
    """Return the records of the jobs with several launchers, by name."""
    entries, _ = coordinator.range(_JOBS)
    return {
        entry.key.removeprefix(_JOBS).removesuffix(_RECORD): _decoded(entry)
        for entry in entries
        if entry.key.endswith(_RECORD)
    }


def _runs(coordinator: Coordinator) -> set[str]:
    """Return the runs that have records of members."""
    entries, _ = coordinator.range("")
    words = (entry.key.split("/") for entry in entries)
    return {
        each[0]
        for each in words
        if len(each) > 1 and each[0] not in _NO_RUNS and each[1] in _OF_RUNS
    }


def _decoded(entry: Entry) -> SharedJobRecord:
    return decode(entry.key, entry.value, SharedJobRecord)


def unreached(address: str, error: CoordinatorError) -> NotFoundError:
    """Return the error for a coordinator that does not answer, with what may be wrong."""
    return NotFoundError(
        f"--coordinator {address}: {error}; check the address, that the job runs, and that "
        "--key-file is the job's key"
    )
