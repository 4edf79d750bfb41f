"""A job on Ray as values that check themselves, and the command of each of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.ckpt.types import Json
from holdfast.elastic.config import Checkpoints, Settings
from holdfast.elastic.errors import ConfigError

TRAINER: Final = "trainer"
_MANAGED: Final = "managed"
_ETCD: Final = ("etcd://", "etcds://")
_OBJECT_STORE: Final = "object_store_memory"

_OURS: Final[Mapping[str, str]] = {
    "--nnodes": "nodes",
    "--nproc": "nproc",
    "--role": "RayOptions(roles)",
    "--coordinator": "RayOptions(coordinator)",
    "--run-dir": "RayOptions(run_dir)",
    "--grace-s": "RayOptions(grace_s)",
    "--join-timeout-s": "RayOptions(wait_s)",
    "--module": "RayOptions(module)",
    "-m": "RayOptions(module)",
    "--parity": "RayOptions(settings)",
    "--parity-group": "RayOptions(settings)",
    "--memory": "RayOptions(settings)",
    "--disk": "RayOptions(settings)",
    "--checkpoint-bandwidth": "RayOptions(settings)",
    "--on-checkpoint-error": "RayOptions(settings)",
    "--stop-grace-s": "RayOptions(settings)",
}
"""Option of ``holdfast run`` → the argument to use for it here."""

_NOT_HERE: Final = (
    *("--nodes", "--world", "--node-rank", "--join", "--host", "--domain", "--etcd", "--job"),
    *("--key-file", "--return-s", "--port", "--notice-file"),
)
"""Options of ``holdfast run`` whose values this adapter finds out, or that have no meaning here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Options of a job on Ray that most jobs leave as they are.

    ``address`` is the cluster's (default: ``RAY_ADDRESS``, or the cluster of this machine).
    ``working_dir`` is a folder that Ray copies to the nodes, in which the script then runs; without
    it every node must see the current folder at the same path. ``env`` adds variables.
    ``coordinator`` is an etcd's URL; by default the calling process serves the coordinator.
    ``settings`` override those of the script, as ``{"snapshots": {"parity": 2}}``. ``roles`` are
    further workers of each job beside the trainers, by name. ``module`` says that the script is the
    name of a module, as for ``python -m``. ``run_options`` are further options of ``holdfast run``,
    such as ``("--preload", "torch")``. ``run_dir`` is an absolute path below which each node keeps
    events and logs, in a folder with the id of its Ray node. ``wait_s`` is the time that the least
    number of nodes may take to be there. ``grace_s`` is the time that a node has to hand its state
    over when Ray drains it. Times are in seconds. Raises ``ConfigError`` for wrong values.
    """

    address: str = ""
    working_dir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    coordinator: str = ""
    settings: Mapping[str, Json] = field(default_factory=dict)
    roles: Mapping[str, int] = field(default_factory=dict)
    module: bool = False
    run_options: Sequence[str] = ()
    run_dir: str = ""
    wait_s: float = 600.0
    grace_s: float = 25.0

    def __post_init__(self) -> None:
        if self.address.startswith("ray://"):
            raise ConfigError(
                f"address={self.address!r}: a Ray client cannot serve the job's coordinator; run "
                "this on a machine of the cluster, or with `ray job submit`"
            )
        _check_coordinator(self.coordinator)
        if self.run_dir and not self.run_dir.startswith("/"):
            raise ConfigError(
                f"run_dir={self.run_dir!r}: Ray may remove the folder in which a script runs; give "
                "an absolute path"
            )
        for name in ("wait_s", "grace_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: give a number above 0")
        if isinstance(self.run_options, str):
            raise ConfigError(f"run_options={self.run_options!r}: give a list of words")
        for word in self.run_options:
            _check_option(word)
        for role, count in self.roles.items():
            if role == TRAINER or not role.isidentifier() or count < 1:
                raise ConfigError(
                    f"roles={dict(self.roles)}: give names other than {TRAINER!r}, each with the "
                    "number of its workers on a node"
                )
        Settings(checkpoint=Checkpoints("a script's own")).overridden(self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """A script, its nodes, and what each of them needs of Ray.

    ``least`` nodes begin the job, at most ``most`` take part; each has ``nproc`` trainers and one
    bundle of ``resources``, in Ray's names and units. Raises ``ConfigError`` for wrong values.
    """

    script: str
    args: tuple[str, ...] = ()
    least: int = 1
    most: int = 1
    nproc: int = 1
    resources: Mapping[str, float]
    options: RayOptions = field(default_factory=RayOptions)

    def __post_init__(self) -> None:
        if not self.script:
            raise ConfigError("script='': give the path of the Python script to run")
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"nodes=({self.least}, {self.most}): give the least and the most number of nodes, "
                "1 or more"
            )
        if self.nproc < 1:
            raise ConfigError(f"nproc={self.nproc}: give the number of trainers on a node")
        if not self.resources or not all(amount > 0 for amount in self.resources.values()):
            raise ConfigError(
                f"resources={dict(self.resources)}: give an amount above 0 for each resource that "
                "a node needs, as in {'CPU': 16, 'GPU': 8}"
            )
        if _OBJECT_STORE in self.resources:
            raise ConfigError(
                f"resources={dict(self.resources)}: {_OBJECT_STORE} is the object store's own; "
                "give 'memory'"
            )

    @classmethod
    def of(
        cls,
        script: str,
        args: Sequence[str],
        *,
        nodes: int | tuple[int, int],
        nproc: int,
        resources: Mapping[str, float] | None,
        options: RayOptions,
    ) -> RayJob:
        """Return the job of a caller's arguments; a node has one CPU for each trainer by default.

        Raises ``ConfigError``.
        """
        if isinstance(args, str):
            raise ConfigError(f"args={args!r}: give a list of words")
        pair = (nodes, nodes) if isinstance(nodes, int) else tuple(nodes)
        if len(pair) != 2 or not all(isinstance(number, int) for number in pair):
            raise ConfigError(f"nodes={nodes!r}: give a number, or (least, most)")
        return cls(
            script=str(script),
            args=tuple(map(str, args)),
            least=pair[0],
            most=pair[1],
            nproc=nproc,
            resources={"CPU": float(nproc)} if resources is None else dict(resources),
            options=options,
        )

    @property
    def wanted(self) -> dict[str, int]:
        """The number of workers of the whole job, by role."""
        return {TRAINER: self.nproc * self.most, **self.options.roles}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The facts about one node that its command needs.

    ``job`` is the job's name at the coordinator, ``node`` the id of its Ray node, ``host`` its
    address for the others. The files are its own.
    """

    job: str
    node: str
    host: str
    key_file: str
    notice_file: str
    run_dir: str


def run_words(job: RayJob, coordinator: str, facts: NodeFacts) -> tuple[str, ...]:
    """Return the words after ``holdfast run`` for a node that joins the job at ``coordinator``.

    Nodes of one Ray node, should there ever be two, share a failure domain: they guard each other
    only if there is no other.
    """
    roles = [word for role, n in job.options.roles.items() for word in ("--role", f"{role}={n}")]
    return (
        *("--nnodes", f"{job.least}:{job.most}", "--join", coordinator, "--job", facts.job),
        *("--nproc", str(job.nproc), *roles),
        *("--host", facts.host, "--domain", facts.node),
        *("--key-file", facts.key_file, "--notice-file", facts.notice_file),
        *("--grace-s", f"{job.options.grace_s:g}", "--join-timeout-s", f"{job.options.wait_s:g}"),
        *("--run-dir", facts.run_dir, "--return-s", "0"),
        *job.options.run_options,
        *(("-m",) if job.options.module else ()),
        job.script,
        *job.args,
    )


def threads_of_a_worker(given: str, cpus: float, workers: int) -> str:
    """Return the value of OMP_NUM_THREADS for each of a node's workers.

    Ray sets it to all CPUs of the actor, of which every worker gets its part. A value of the
    user's own (any other) stays.
    """
    of_ray = str(max(1, int(cpus)))
    return str(max(1, int(cpus) // workers)) if given in ("", of_ray) else given


def _check_coordinator(url: str) -> None:
    if url.startswith(_MANAGED):
        raise ConfigError(
            f"coordinator={url!r}: nodes on Ray end with the process that called launch, which "
            "serves the coordinator; leave it out, or give the etcd:// address of an etcd of yours"
        )
    if url and not url.startswith(_ETCD):
        raise ConfigError(f"coordinator={url!r}: give etcd://HOST:PORT[,HOST:PORT...] or leave it")


def _check_option(word: str) -> None:
    """Refuse an option that is set here; argparse would also take the beginning of its name."""
    name = word.partition("=")[0]
    if not name.startswith("-") or name == "--":
        return
    short = name if name.startswith("--") else name[:2]
    for ours, argument in _OURS.items():
        if ours == short or (name.startswith("--") and ours.startswith(name)):
            raise ConfigError(f"run_options has {word}: use {argument} instead of {ours}")
    for ours in _NOT_HERE:
        if ours.startswith(name):
            raise ConfigError(f"run_options has {word}: leave {ours} out, on Ray it is known")
