"""What the decorator is told: mesh, batch and the settings of a run, checked at the door. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckpt import codecs
from ckpt.errors import StateError
from ckpt.target import CheckpointTarget
from elastic.errors import ConfigError
from elastic.records import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The wanted grid of ranks: ``dp`` data-parallel ranks, ``"auto"`` for whoever is there.

    With ``"auto"`` the run goes on with any number of ranks from ``min_dp`` up. ``tp`` (tensor
    parallelism) is 1 in this version.
    """

    dp: int | Literal["auto"] = "auto"
    tp: int = 1
    min_dp: int = 1

    def __post_init__(self) -> None:
        if self.dp != "auto" and (not isinstance(self.dp, int) or self.dp < 1):
            raise ConfigError(f"Mesh(dp={self.dp!r}): give a positive number or 'auto'")
        if self.tp != 1:
            raise ConfigError(f"Mesh(tp={self.tp!r}): this version does data parallelism, tp=1")
        if self.min_dp < 1:
            raise ConfigError(f"Mesh(min_dp={self.min_dp!r}): at least one rank must train")
        if self.dp != "auto" and self.min_dp > self.dp:
            raise ConfigError(f"Mesh(dp={self.dp}, min_dp={self.min_dp}): min_dp exceeds dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's work: ``microbatches`` of ``size`` samples each, whatever the world size."""

    microbatches: int
    size: int = 1

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
    parity: int = 1
    keep: int = 2
    checkpoint: str | None = None
    checkpoint_every: int = 100
    checkpoint_compression: Mapping[str, str] = field(default_factory=dict)
    checkpoint_incremental: bool = False
    exact: bool = False
    seed: int = 0
    collective_timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.snapshot_every < 1:
            raise ConfigError(f"snapshot_every={self.snapshot_every!r}: give 1 or more steps")
        if self.parity < 0:
            raise ConfigError(f"parity={self.parity!r}: give the number of nodes that may be lost")
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
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"seed={self.seed!r}: give a number from 0 to 2**63 - 1")
        if self.collective_timeout_s <= 0:
            raise ConfigError(f"collective_timeout_s={self.collective_timeout_s!r}: be positive")

    def target(self) -> CheckpointTarget | None:
        """Return where checkpoints go and how, None for none."""
        if self.checkpoint is None:
            return None
        return CheckpointTarget(
            root=self.checkpoint,
            compression=dict(self.checkpoint_compression),
            incremental=self.checkpoint_incremental,
        )

    def job(self) -> JobSpec:
        """Return what the control plane must know of it."""
        dp = None if self.mesh.dp == "auto" else self.mesh.dp
        min_dp = self.mesh.min_dp if dp is None else dp
        return JobSpec(dp=dp, min_dp=min_dp, parity=self.parity, keep=self.keep)
