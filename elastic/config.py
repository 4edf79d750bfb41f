"""What the decorator is told: mesh, batch and the settings of a run, checked at the door. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from holdfast.ckpt import sizes
from holdfast.ckpt.errors import StateError
from holdfast.ckpt.format import codecs
from holdfast.ckpt.memory.target import CheckpointTarget, DiskTarget
from holdfast.ckpt.parity.groups import GROUP_SIZE
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loss import LossGuard
from holdfast.elastic.membership.records import JobSpec

Exact: TypeAlias = bool | Literal["int64"]
"""Whether weights must not depend on the world: no, by rounding gradients, or in fixed point."""

MAX_STOP_GRACE_S = 4.0
"""An agent kills a sidecar that takes longer to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The wanted grid of ranks: ``dp`` data-parallel groups, ``"auto"`` for whoever is there.

    With ``"auto"`` the run goes on with any number of groups from ``min_dp`` up. Each has ``tp`` ×
    ``pp`` ranks, which share its work by tensor parallelism and as the stages of a pipeline;
    several sizes, as in ``tp=(4, 2)``, are accepted in that order. ``shard`` cuts the groups into
    replicas of so many, each of which has all of the state (hybrid sharding). ``ep`` groups that
    follow each other have the experts of a mixture between them. `axes` are the names
    of the axes of ``run.mesh``. A script started by hand is alone, and all axes have the size 1.
    ``device`` is the kind that ``run.mesh`` spans: ``"cpu"``, ``"cuda"`` with a device per rank and
    NCCL between them, or ``"auto"`` for CUDA where it is to be had. CUDA is written and not yet run
    on a device; it takes no pipeline stages.
    """

    dp: int | Literal["auto"] = "auto"
    tp: int | tuple[int, ...] = 1
    pp: int | tuple[int, ...] = 1
    ep: int | tuple[int, ...] = 1
    shard: int | tuple[int, ...] | None = None
    min_dp: int = 1
    device: Literal["auto", "cpu", "cuda"] = "cpu"

    def __post_init__(self) -> None:
        self._check_device()
        if self.dp != "auto" and (not isinstance(self.dp, int) or self.dp < 1):
            raise ConfigError(f"Mesh(dp={self.dp!r}): give a positive number or 'auto'")
        for name in ("tp", "pp", "ep", "shard"):
            self._check_sizes(name, getattr(self, name))
        if self.min_dp < 1:
            raise ConfigError(f"Mesh(min_dp={self.min_dp!r}): at least one rank must train")
        if self.dp != "auto" and self.min_dp > self.dp:
            raise ConfigError(f"Mesh(dp={self.dp}, min_dp={self.min_dp}): min_dp exceeds dp")
        if self.dp != "auto" and all(self.dp % size for size in sizes_of(self.shard)):
            raise ConfigError(f"Mesh(dp={self.dp}, shard={self.shard}): dp is no multiple of shard")
        self._check_experts()

    def _check_device(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"Mesh(device={self.device!r}): give 'auto', 'cpu' or 'cuda'")
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

    def _check_sizes(self, name: str, value: object) -> None:
        found = value if isinstance(value, tuple) else (1 if value is None else value,)
        fine = all(isinstance(size, int) and size > 0 for size in found)
        if not found or not fine or len(set(found)) != len(found):
            raise ConfigError(
                f"Mesh({name}={value!r}): give a positive number, or several different ones, the "
                "preferred first"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of ``run.mesh``: what the job asks for, whatever the sizes come to.

        With ``ep`` the last data-parallel axis is two, ``edp`` of those with the same experts and
        ``ep``; it is there under its own name as well.
        """
        data: tuple[str, ...] = ("dp",) if self.shard is None else ("replicate", "shard")
        if self.ep != 1:
            data = (*data[:-1], "edp", "ep")
        return (*data, *(name for name in ("pp", "tp") if getattr(self, name) != 1))


def sizes_of(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the accepted sizes of an axis, preferred ones first; 1 where it is not asked for."""
    if value is None:
        return (1,)
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's work: ``microbatches`` of ``size`` samples each, whatever the world size.

    ``by_speed``: faster ranks run more of them. Without a word they do in exact mode, where that
    changes no bit of the result, unless there are pipeline stages, whose schedules want certain
    numbers; elsewhere it changes in which order gradients are added up.
    """

    microbatches: int
    size: int = 1
    by_speed: bool | None = None

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ConfigError(f"Batch(microbatches={self.microbatches!r}): at least one is needed")
        if self.size < 1:
            raise ConfigError(f"Batch(size={self.size!r}): a microbatch has at least one sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything `elastic.resilient` takes; see there."""

    mesh: Mesh = Mesh()
    batch: Batch = Batch(microbatches=1)
    snapshot_every: int = 1
    parity: int | Literal["replicate"] = 1
    parity_group: int = GROUP_SIZE
    keep: int = 2
    memory: str | int | None = None
    checkpoint: str | None = None
    checkpoint_every: int = 100
    checkpoint_compression: Mapping[str, str] = field(default_factory=dict)
    checkpoint_incremental: bool = False
    checkpoint_bandwidth: str | int | None = None
    on_checkpoint_error: Literal["retry", "skip", "stop"] = "retry"
    checkpoint_retries: int = 3
    checkpoint_failures_allowed: int = 2
    checkpoint_wait_s: float = 600.0
    disk: str | None = None
    disk_every: int = 10
    stop_grace_s: float = 0.0
    exact: Exact = False
    seed: int = 0
    collective_timeout_s: float = 1800.0
    loss_guard: LossGuard | None = None
    rehearse: bool = True

    def __post_init__(self) -> None:
        if self.snapshot_every < 1:
            raise ConfigError(f"snapshot_every={self.snapshot_every!r}: give 1 or more steps")
        self._check_parity()
        self.memory_bytes()
        if self.keep < 1:
            raise ConfigError(f"keep={self.keep!r}: at least one snapshot must stay in memory")
        if self.checkpoint_every < 1:
            raise ConfigError(f"checkpoint_every={self.checkpoint_every!r}: give 1 or more steps")
        if self.checkpoint is not None and not self.checkpoint:
            raise ConfigError("checkpoint='': give a directory, or None for no checkpoints")
        try:
            codecs.check(self.checkpoint_compression)
        except StateError as error:
            raise ConfigError(f"checkpoint_compression: {error}") from error
        if self.disk is not None and not self.disk:
            raise ConfigError("disk='': give a directory on the nodes' own disks, or None")
        if self.disk_every < 1:
            raise ConfigError(f"disk_every={self.disk_every!r}: give 1 or more steps")
        if not 0 <= self.stop_grace_s <= MAX_STOP_GRACE_S:
            raise ConfigError(f"stop_grace_s={self.stop_grace_s!r}: give 0 to {MAX_STOP_GRACE_S:g}")
        self._check_checkpoint_errors()
        self.checkpoint_bytes_per_s()
        if self.exact not in (False, True, "int64"):
            raise ConfigError(f"exact={self.exact!r}: give True, False or 'int64'")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed={self.seed!r}: give a number from 0 to 2**63 - 1")
        if self.collective_timeout_s <= 0:
            raise ConfigError(f"collective_timeout_s={self.collective_timeout_s!r}: be positive")
        self._check_loss_guard()
        self._check_cut()

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
                f"exact=True with Mesh(tp={self.mesh.tp}): another number of tensor-parallel ranks "
                "adds in another order; give one size, or set exact=False"
            )
        if self.exact and len(sizes_of(self.mesh.ep)) > 1:
            raise ConfigError(
                f"exact=True with Mesh(ep={self.mesh.ep}): an expert adds up the tokens of so many "
                "microbatches at once; give one size, or set exact=False"
            )

    @property
    def shares_by_speed(self) -> bool:
        """Whether faster ranks run more microbatches.

        With pipeline stages only where it is asked for: few schedules take any number of them. With
        CUDA too: what a microbatch takes there is not seen by the processor's clock.
        """
        if self.batch.by_speed is not None:
            return self.batch.by_speed
        return bool(self.exact) and self.mesh.pp == 1 and self.mesh.device == "cpu"

    def _check_parity(self) -> None:
        if self.parity != "replicate" and (not isinstance(self.parity, int) or self.parity < 0):
            raise ConfigError(
                f"parity={self.parity!r}: give the number of nodes that may be lost, or "
                "'replicate' for a whole copy on another node"
            )
        if not isinstance(self.parity_group, int) or self.parity_group < 2:
            raise ConfigError(f"parity_group={self.parity_group!r}: a group has 2 nodes or more")
        if self.parity != "replicate" and self.parity_group <= self.parity:
            raise ConfigError(
                f"parity_group={self.parity_group}, parity={self.parity}: a group needs more nodes "
                f"than may be lost of it; give parity_group={self.parity + 1} or more"
            )

    def _check_loss_guard(self) -> None:
        guard = self.loss_guard
        if guard is None or not guard.rolls_back:
            return
        least = 1 + -(-guard.steps_back // self.snapshot_every)
        if self.keep < least:
            raise ConfigError(
                f"LossGuard(steps_back={guard.steps_back}) needs snapshots that old, and with "
                f"keep={self.keep} and snapshot_every={self.snapshot_every} there are none: give "
                f"keep={least} or more, or go back fewer steps"
            )

    def _check_checkpoint_errors(self) -> None:
        if self.on_checkpoint_error not in ("retry", "skip", "stop"):
            raise ConfigError(
                f"on_checkpoint_error={self.on_checkpoint_error!r}: give 'retry', 'skip' or 'stop'"
            )
        for name in ("checkpoint_retries", "checkpoint_failures_allowed", "checkpoint_wait_s"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"{name}={value!r}: give 0 or more")

    def checkpoint_bytes_per_s(self) -> int:
        """Return how fast a node may write checkpoints, 0 for no limit. Raises ``ConfigError``."""
        if self.checkpoint_bandwidth is None:
            return 0
        try:
            return sizes.parse_rate(self.checkpoint_bandwidth)
        except ValueError as error:
            raise ConfigError(f"checkpoint_bandwidth: {error}") from error

    def memory_bytes(self) -> int:
        """Return the declared host memory per node, 0 for none. Raises ``ConfigError``."""
        if self.memory is None:
            return 0
        try:
            return sizes.parse_bytes(str(self.memory))
        except ValueError as error:
            raise ConfigError(f"memory={self.memory!r}: {error}") from error

    def disk_target(self) -> DiskTarget | None:
        """Return where protected snapshots are spilled to, None for nowhere."""
        if self.disk is None:
            return None
        return DiskTarget(directory=self.disk, every=self.disk_every, grace_s=self.stop_grace_s)

    def target(self) -> CheckpointTarget | None:
        """Return where checkpoints go and how, None for none."""
        if self.checkpoint is None:
            return None
        return CheckpointTarget(
            root=self.checkpoint,
            compression=dict(self.checkpoint_compression),
            incremental=self.checkpoint_incremental,
            bytes_per_s=self.checkpoint_bytes_per_s(),
            grace_s=self.stop_grace_s,
            retries=self.checkpoint_retries if self.on_checkpoint_error == "retry" else 0,
            failures_allowed={
                "retry": self.checkpoint_failures_allowed,
                "skip": None,
                "stop": 0,
            }[self.on_checkpoint_error],
        )

    def job(self) -> JobSpec:
        """Return what the control plane must know of it."""
        dp = None if self.mesh.dp == "auto" else self.mesh.dp
        min_dp = self.mesh.min_dp if dp is None else dp
        return JobSpec(
            dp=dp,
            min_dp=min_dp,
            tp=sizes_of(self.mesh.tp),
            pp=sizes_of(self.mesh.pp),
            ep=sizes_of(self.mesh.ep),
            shard=sizes_of(self.mesh.shard),
            parity=1 if self.parity == "replicate" else self.parity,
            columns=1 if self.parity == "replicate" else 0,
            parity_group=self.parity_group,
            keep=self.keep,
            memory_bytes=self.memory_bytes(),
            microbatches=self.batch.microbatches if self.shares_by_speed else 0,
            device=self.mesh.device,
        )
