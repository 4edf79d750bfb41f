"""The values that configure a run; each checks itself when it is made. Pure."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Literal, TypeAlias

from holdfast.ckpt import checks, sizes
from holdfast.ckpt.checks import Rule
from holdfast.ckpt.errors import ArgumentError
from holdfast.ckpt.format import codecs
from holdfast.ckpt.memory.target import CheckpointTarget, DiskTarget
from holdfast.ckpt.parity.groups import GROUP_SIZE
from holdfast.ckpt.types import Json
from holdfast.elastic import randomness
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loss import LossGuard
from holdfast.elastic.membership.records import JobSpec
from holdfast.elastic.neighbors.settings import Neighbors
from holdfast.elastic.sea.settings import Islands

Exact: TypeAlias = Literal[True, "float32", "int64"] | None
"""Method that makes sums of gradients independent of the world: rounding, fixed point, or none.

True: fixed point, or rounding for models that FSDP2 shards.
"""

OVERRIDABLE: Final = ("snapshots", "checkpoint", "timeouts", "rehearse", "islands")
"""The fields of `Settings` that a launcher may override (`Settings.overridden`)."""

MAX_STOP_GRACE_S = 4.0
"""An agent kills a sidecar that takes longer to end."""


def _check_group(group: object, rules: Mapping[str, Rule]) -> None:
    checks.check_fields(group, rules, error=ConfigError)


def _memory_bytes(snapshots: Snapshots) -> int:
    """Return the declared host memory per node, 0 for none."""
    if snapshots.memory is None:
        return 0
    try:
        return sizes.parse_bytes(str(snapshots.memory))
    except ValueError as error:
        raise ConfigError(f"Snapshots(memory={snapshots.memory!r}): {error}") from error


def _bytes_per_s(checkpoints: Checkpoints) -> int:
    """Return the limit of a node's write rate, 0 for none."""
    if checkpoints.bandwidth is None:
        return 0
    try:
        return sizes.parse_rate(checkpoints.bandwidth)
    except ValueError as error:
        raise ConfigError(f"Checkpoints(bandwidth={checkpoints.bandwidth!r}): {error}") from error


def _sizes(value: object) -> str:
    """Return the remedy for an axis's sizes, "" if they are right."""
    found = value if isinstance(value, tuple) else (value,)
    fine = all(checks.is_count(size, least=1) for size in found)
    if found and fine and len(set(found)) == len(found):
        return ""
    return "give a positive number, or a tuple of several different ones, the preferred first"


_SECONDS: Final = checks.number(0, math.inf, remedy="give 0 or more seconds")
_STEPS: Final = checks.count(1, remedy="give 1 or more steps")

_MESH: Final[Mapping[str, Rule]] = {
    "dp": checks.either("auto", checks.count(1, remedy="give a positive number or 'auto'")),
    "tp": _sizes,
    "pp": _sizes,
    "ep": _sizes,
    "shard": checks.optional(_sizes),
    "min_dp": checks.count(1, remedy="give 1 or more; at least one rank must train"),
    "device": checks.one_of("auto", "cpu", "cuda"),
}
_BATCH: Final[Mapping[str, Rule]] = {
    "microbatches": checks.count(1, remedy="give 1 or more microbatches"),
    "size": checks.count(1, remedy="give 1 or more; a microbatch has at least one sample"),
    "by_speed": checks.optional(checks.flag(remedy="give True, False or None")),
}
_SNAPSHOTS: Final[Mapping[str, Rule]] = {
    "every": _STEPS,
    "parity": checks.either(
        "replicate",
        checks.count(
            0,
            remedy="give the number of nodes that may be lost, or 'replicate' for a whole copy on "
            "another node",
        ),
    ),
    "group": checks.count(2, remedy="give 2 or more nodes"),
    "keep": checks.count(1, remedy="give 1 or more; one snapshot must stay in memory"),
    "memory": checks.size_or_none(remedy="give a size, as in '12GiB', bytes as an int, or None"),
    "disk": checks.optional(
        checks.text(remedy="give a directory on the nodes' own disks, as a string, or None")
    ),
    "disk_every": _STEPS,
}
_CHECKPOINTS: Final[Mapping[str, Rule]] = {
    "root": checks.text(remedy=f"give {checks.ROOTS}, as a string"),
    "every": _STEPS,
    "compression": checks.instance(
        Mapping, remedy="give patterns of names with codecs, such as {'*': 'zstd'}"
    ),
    "incremental": checks.flag(),
    "bandwidth": checks.size_or_none(
        remedy="give a rate, as in '500MB/s', bytes per second as an int, or None"
    ),
    "on_error": checks.one_of("retry", "skip", "stop"),
    "retries": checks.count(0, remedy="give 0 or more"),
    "failures_allowed": checks.count(0, remedy="give 0 or more"),
    "wait_s": _SECONDS,
}
_TIMEOUTS: Final[Mapping[str, Rule]] = {
    "collective_s": checks.number(
        0,
        checks.LONGEST_S,
        above=True,
        remedy=f"give seconds above 0, at most {checks.LONGEST_S:g}",
    ),
    "stop_grace_s": checks.number(
        0, MAX_STOP_GRACE_S, remedy=f"give 0 to {MAX_STOP_GRACE_S:g} seconds"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The wanted grid of ranks: ``dp`` data-parallel groups, ``"auto"`` for as many as there are.

    With ``"auto"`` the run continues with any number of groups from ``min_dp`` up. Each group has
    ``tp`` × ``pp`` ranks, which share its work by tensor parallelism and as the stages of a
    pipeline; several sizes, as in ``tp=(4, 2)``, are accepted in that order. ``shard`` divides the
    groups into replicas of that many groups; each replica holds the whole state (hybrid sharding).
    ``ep`` consecutive groups share the experts of a mixture. `axes` are the names of the axes of
    ``run.mesh``. A script started by hand has one rank, and all axes have the size 1. ``device`` is
    the device type of ``run.mesh``: ``"cpu"``, ``"cuda"`` with one device per rank and NCCL between
    them, or ``"auto"`` for CUDA if it is available. The CUDA path has not yet run on a device; it
    supports no pipeline stages.
    """

    dp: int | Literal["auto"] = "auto"
    tp: int | tuple[int, ...] = 1
    pp: int | tuple[int, ...] = 1
    ep: int | tuple[int, ...] = 1
    shard: int | tuple[int, ...] | None = None
    min_dp: int = 1
    device: Literal["auto", "cpu", "cuda"] = "cpu"

    def __post_init__(self) -> None:
        _check_group(self, _MESH)
        self._check_device()
        if self.dp != "auto" and self.min_dp > self.dp:
            raise ConfigError(f"Mesh(dp={self.dp}, min_dp={self.min_dp}): min_dp exceeds dp")
        if self.dp != "auto" and all(self.dp % size for size in sizes_of(self.shard)):
            raise ConfigError(f"Mesh(dp={self.dp}, shard={self.shard}): dp is no multiple of shard")
        self._check_experts()

    def _check_device(self) -> None:
        if self.device == "cuda" and self.pp != 1:
            raise ConfigError(
                f"Mesh(device='cuda', pp={self.pp}): stages send to each other one by one, for "
                "which NCCL may wait forever; give device='cpu', or no pp"
            )

    def _check_experts(self) -> None:
        sizes, shards = sizes_of(self.ep), sizes_of(self.shard)
        if self.dp != "auto" and all(self.dp % size for size in sizes):
            raise ConfigError(f"Mesh(dp={self.dp}, ep={self.ep}): dp is no multiple of ep")
        if self.shard is not None and all(shard % ep for shard in shards for ep in sizes):
            raise ConfigError(
                f"Mesh(shard={self.shard}, ep={self.ep}): experts are spread over the shards of "
                "one replica; give an ep that divides shard"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes of ``run.mesh``. They follow from the request, not from the sizes.

        With ``ep`` the last data-parallel axis is split in two: ``edp``, the ranks with the same
        experts, and ``ep``. The unsplit axis keeps its own name as well.
        """
        data: tuple[str, ...] = ("dp",) if self.shard is None else ("replicate", "shard")
        if self.ep != 1:
            data = (*data[:-1], "edp", "ep")
        return (*data, *(name for name in ("pp", "tp") if getattr(self, name) != 1))


def sizes_of(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the accepted sizes of an axis, preferred ones first; 1 if it is not requested."""
    if value is None:
        return (1,)
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's work: ``microbatches`` of ``size`` samples each, whatever the world size.

    ``by_speed``: faster ranks run more microbatches. By default this is on in exact mode, where it
    changes no bit of the result, except with pipeline stages, whose schedules need certain numbers
    of microbatches. Outside exact mode it changes the order in which gradients are added.
    """

    microbatches: int
    size: int = 1
    by_speed: bool | None = None

    def __post_init__(self) -> None:
        _check_group(self, _BATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """Copies of the state in host memory, from which a run continues after a failure.

    The state is copied every ``every`` steps; the ``keep`` newest protected copies stay, or as many
    as a `LossGuard` may go back. Any ``parity`` nodes of each group of about ``group`` nodes may be
    lost (0: none; ``"replicate"``: one, by a whole copy on another node). ``memory`` (as in
    ``"12GiB"``) is the host memory that a node may use for snapshots. Every ``disk_every`` steps
    the snapshot is also spilled to ``disk``, a directory on every node's own disk. The two newest
    stay there when the job ends. A later start with the same directory continues from them unless a
    checkpoint is newer.
    """

    every: int = 1
    parity: int | Literal["replicate"] = 1
    group: int = GROUP_SIZE
    keep: int = 1
    memory: str | int | None = None
    disk: str | None = None
    disk_every: int = 10

    def __post_init__(self) -> None:
        _check_group(self, _SNAPSHOTS)
        _memory_bytes(self)
        if self.parity != "replicate" and self.group <= self.parity:
            raise ConfigError(
                f"Snapshots(group={self.group}, parity={self.parity}): a group needs more nodes "
                f"than may be lost of it; give group={self.parity + 1} or more"
            )


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Durable copies of the state below ``root``, from which a later start continues.

    ``root`` is a directory, ``s3://bucket/prefix``, ``gs://bucket/prefix`` or
    ``az://container/prefix``. A checkpoint is written every ``every`` steps and after the last.
    ``compression`` and ``incremental`` are `ckpt.save`'s ``compression`` and ``base="latest"``.
    ``bandwidth`` (as in ``"500MB/s"``) limits the write rate of a node.

    Training never waits for the store: while one checkpoint is being written, the newest of the
    others waits, and older ones are skipped. ``on_error``: ``"retry"`` tries ``retries`` more
    times, then warns; it ends the job if more than ``failures_allowed`` checkpoints in a row have
    failed, or the last one. ``"skip"`` only warns; ``"stop"`` ends the job at the first failure. At
    its end the job waits for the last checkpoint, at most ``wait_s``.
    """

    root: str
    _: KW_ONLY
    every: int = 100
    compression: Mapping[str, str] = field(default_factory=dict)
    incremental: bool = False
    bandwidth: str | int | None = None
    on_error: Literal["retry", "skip", "stop"] = "retry"
    retries: int = 3
    failures_allowed: int = 2
    wait_s: float = 600.0

    def __post_init__(self) -> None:
        _check_group(self, _CHECKPOINTS)
        try:
            codecs.check(self.compression)
        except ArgumentError as error:
            raise ConfigError(f"Checkpoints(compression=...): {error}") from error
        _bytes_per_s(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time limits of a run, in seconds.

    ``collective_s``: a collective that takes longer has failed. ``stop_grace_s``: when the job is
    stopped (SIGTERM, as before a preemption), the time within which the newest protected step is
    saved to `Snapshots.disk` and to `Checkpoints`.
    """

    collective_s: float = 1800.0
    stop_grace_s: float = 0.0

    def __post_init__(self) -> None:
        _check_group(self, _TIMEOUTS)


_GROUPS: Final[dict[str, type]] = {
    "mesh": Mesh,
    "batch": Batch,
    "snapshots": Snapshots,
    "checkpoint": Checkpoints,
    "loss_guard": LossGuard,
    "islands": Islands,
    "timeouts": Timeouts,
}
_OPTIONAL: Final = ("checkpoint", "loss_guard", "islands")


def _group_rule(name: str, kind: type) -> Rule:
    rule = checks.instance(kind, remedy=f"give {name}=holdfast.{kind.__name__}(...)")
    return checks.optional(rule) if name in _OPTIONAL else rule


_SETTINGS: Final[Mapping[str, Rule]] = {
    **{name: _group_rule(name, kind) for name, kind in _GROUPS.items()},
    "exact": checks.optional(
        checks.true_or(
            checks.one_of(
                "float32",
                "int64",
                remedy="give True for weights that do not depend on the world size ('float32' to "
                "round gradients, 'int64' to add in fixed point), or None for weights that depend "
                "on it in their last bits",
            )
        )
    ),
    "seed": checks.count(0, remedy="give a number from 0 to 2**63 - 1"),
    "on_lost_state": checks.optional(
        checks.either(
            "neighbors",
            checks.instance(
                Neighbors, remedy="give None, 'neighbors' or holdfast.Neighbors(beyond=...)"
            ),
        )
    ),
    "rehearse": checks.flag(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The configuration of a run: the arguments of `elastic.resilient`, checked together."""

    mesh: Mesh = Mesh()
    batch: Batch = Batch(microbatches=1)
    snapshots: Snapshots = Snapshots()
    checkpoint: Checkpoints | None = None
    exact: Exact = None
    seed: int = 0
    loss_guard: LossGuard | None = None
    islands: Islands | None = None
    on_lost_state: Literal["neighbors"] | Neighbors | None = None
    rehearse: bool = True
    timeouts: Timeouts = Timeouts()

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in _SETTINGS}
        checks.check("resilient", values, _SETTINGS, error=ConfigError)
        self._check_cut()
        self._check_island()
        self._check_neighbors()

    def _check_cut(self) -> None:
        for ep in sizes_of(self.mesh.ep):
            if self.batch.microbatches % ep:
                raise ConfigError(
                    f"Batch(microbatches={self.batch.microbatches}) with Mesh(ep={self.mesh.ep}): "
                    f"ranks that have the experts between them run microbatches at the same time; "
                    f"give a multiple of {ep}"
                )
        if self.exact and len(sizes_of(self.mesh.tp)) > 1:
            raise ConfigError(
                f"exact={self.exact!r} with Mesh(tp={self.mesh.tp}): another number of "
                "tensor-parallel ranks adds in another order; give one size, or set exact=None"
            )
        if self.exact and len(sizes_of(self.mesh.ep)) > 1:
            raise ConfigError(
                f"exact={self.exact!r} with Mesh(ep={self.mesh.ep}): an expert adds up the tokens "
                "of so many microbatches at once; give one size, or set exact=None"
            )

    def _check_island(self) -> None:
        if self.islands is None:
            return
        for axis in ("pp", "ep"):
            if sizes_of(getattr(self.mesh, axis)) != (1,):
                raise ConfigError(
                    f"islands with Mesh({axis}={getattr(self.mesh, axis)}): islands merge whole "
                    f"parameters that every group has; give {axis}=1, or leave islands out"
                )
        if self.mesh.device == "cuda":
            raise ConfigError(
                "islands with Mesh(device='cuda'): islands train on the CPU in this version; give "
                "device='cpu', or leave islands out"
            )
        if self.held_steps > self.islands.overlap:
            raise ConfigError(
                f"LossGuard(steps_back={self.held_steps}) with "
                f"Islands(overlap={self.islands.overlap}): work is sent once the loss of "
                f"{self.held_steps} more steps was right, but merged {self.islands.overlap} steps "
                f"later; give steps_back={self.islands.overlap} or less, or a larger overlap"
            )

    def _check_neighbors(self) -> None:
        if self.on_lost_state is None:
            return
        given = f"on_lost_state={self.on_lost_state!r}"
        if self.exact:
            raise ConfigError(
                f"{given} with exact={self.exact!r}: a stage that is set from others is not "
                "the one that was lost; give exact=None, or leave on_lost_state out"
            )
        if max(sizes_of(self.mesh.pp)) == 1:
            raise ConfigError(
                f"{given} with Mesh(pp={self.mesh.pp}): only a stage of a pipeline has neighbours; "
                "give Mesh(pp=3) or more, or leave on_lost_state out"
            )

    @property
    def neighbors(self) -> Neighbors | None:
        """The rule by which lost stages are set from their neighbours, None if they never are."""
        return Neighbors() if self.on_lost_state == "neighbors" else self.on_lost_state

    def check_named(self) -> None:
        """Raise ``ConfigError`` for an island without a name or a meeting place."""
        missing = [n for n in ("name", "meet") if self.islands and not getattr(self.islands, n)]
        if missing:
            options = {"name": "--island NAME", "meet": "--sea URL"}
            raise ConfigError(
                f"Islands({missing[0]}=''): an island needs a name and a meeting place; give "
                f"{missing[0]}=..., or start it with holdfast run {options[missing[0]]}"
            )

    @property
    def own_seed(self) -> int:
        """The seed of the order of samples and of every random stream in the loop.

        It is ``seed``, except of an island: each has other samples and draws, by its name, while
        ``seed`` gives all of them the same first weights.
        """
        if self.islands is None:
            return self.seed
        return randomness.stream_seed(self.seed, "island", self.islands.name)

    @property
    def held_steps(self) -> int:
        """The steps for which an island holds its work back: as far as the loss guard goes back."""
        guard = self.loss_guard
        return guard.steps_back if guard is not None and guard.rolls_back else 0

    @property
    def _kept(self) -> int:
        """The protected steps that stay in memory: those asked for, and as far as a guard goes."""
        guard, snapshots = self.loss_guard, self.snapshots
        if guard is None or not guard.rolls_back:
            return snapshots.keep
        tides = self.islands is not None and snapshots.every > 1  # a tide has a snapshot of its own
        return max(snapshots.keep, 1 + -(-guard.steps_back // snapshots.every) + tides)

    def overridden(self, overrides: Mapping[str, Json], *, stage: str = "") -> Settings:
        """Return these settings with the launcher's overrides applied.

        ``overrides`` has the shape of `Settings`: a value by the name of a field, or, for a group,
        the values of its fields that differ. ``{stage}`` in a text stands for the name of the
        function ``stage``, so that each stage of a script gets a directory of its own. A script
        that writes no checkpoints writes them if the launcher gives a ``root``; other overrides of
        checkpoints have no effect on it. Raises ``ConfigError`` for an unknown name and for a wrong
        value.
        """
        changed: dict[str, Any] = {}
        for name, value in overrides.items():
            if name not in OVERRIDABLE:
                raise ConfigError(
                    f"the launcher overrides {name!r}: only {', '.join(OVERRIDABLE)} can be"
                )
            before = getattr(self, name)
            if name == "checkpoint" and before is None and _has_root(value):
                before = Checkpoints("the launcher's")
            if name == "islands" and before is None:
                raise ConfigError(
                    "the launcher gives an island a name or a meeting place, and the script is "
                    "none: write @holdfast.resilient(islands=holdfast.Islands(...)) there"
                )
            if name not in _GROUPS:
                changed[name] = value
            elif before is not None:
                changed[name] = _replaced(before, name, value, stage=stage)
        return dataclasses.replace(self, **changed)

    @property
    def shares_by_speed(self) -> bool:
        """True if faster ranks run more microbatches.

        With pipeline stages only on request, because few schedules accept any number of
        microbatches. With CUDA only on request too, because the processor's clock does not measure
        a microbatch there.
        """
        if self.batch.by_speed is not None:
            return self.batch.by_speed
        return bool(self.exact) and self.mesh.pp == 1 and self.mesh.device == "cpu"

    def disk_target(self) -> DiskTarget | None:
        """Return the disk target of protected snapshots, None if they are not spilled."""
        snapshots = self.snapshots
        if snapshots.disk is None:
            return None
        grace_s = self.timeouts.stop_grace_s
        return DiskTarget(directory=snapshots.disk, every=snapshots.disk_every, grace_s=grace_s)

    def target(self) -> CheckpointTarget | None:
        """Return the target of checkpoints and its options, None if there are no checkpoints."""
        checkpoint = self.checkpoint
        if checkpoint is None:
            return None
        return CheckpointTarget(
            root=checkpoint.root,
            compression=dict(checkpoint.compression),
            incremental=checkpoint.incremental,
            bytes_per_s=_bytes_per_s(checkpoint),
            grace_s=self.timeouts.stop_grace_s,
            retries=checkpoint.retries if checkpoint.on_error == "retry" else 0,
            failures_allowed={
                "retry": checkpoint.failures_allowed,
                "skip": None,
                "stop": 0,
            }[checkpoint.on_error],
        )

    def job(self) -> JobSpec:
        """Return the part of these settings that the control plane needs."""
        dp = None if self.mesh.dp == "auto" else self.mesh.dp
        min_dp = self.mesh.min_dp if dp is None else dp
        snapshots = self.snapshots
        return JobSpec(
            dp=dp,
            min_dp=min_dp,
            tp=sizes_of(self.mesh.tp),
            pp=sizes_of(self.mesh.pp),
            ep=sizes_of(self.mesh.ep),
            shard=sizes_of(self.mesh.shard),
            parity=1 if snapshots.parity == "replicate" else snapshots.parity,
            columns=1 if snapshots.parity == "replicate" else 0,
            parity_group=snapshots.group,
            keep=self._kept,
            memory_bytes=_memory_bytes(snapshots),
            microbatches=self.batch.microbatches if self.shares_by_speed else 0,
            device=self.mesh.device,
            beyond=None if self.neighbors is None else self.neighbors.beyond,
        )


def _has_root(values: Json) -> bool:
    return isinstance(values, Mapping) and "root" in values


def _replaced(group: Any, name: str, values: Json, *, stage: str) -> Any:
    """Return a group with ``values`` in place of its own values. Raises ``ConfigError``."""
    known = [each.name for each in dataclasses.fields(group)]
    if not isinstance(values, Mapping):
        raise ConfigError(f"the launcher overrides {name} by {values!r}: give values by name")
    for key in values:
        if key not in known:
            raise ConfigError(
                f"the launcher overrides {name}.{key}: there is only {', '.join(known)}"
            )
    own = re.sub(r"\W+", "-", stage).strip("-")
    named = {
        key: value.replace("{stage}", own) if isinstance(value, str) else value
        for key, value in values.items()
    }
    return dataclasses.replace(group, **named)
