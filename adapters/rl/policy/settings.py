"""The settings of the policies of a job that has several."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

import msgspec
from torch import nn

from holdfast.adapters.rl.loss.ppo import LossConfig
from holdfast.adapters.rl.policy.lora import LoraConfig
from holdfast.adapters.rl.policy.model import ModelConfig

MOST_POLICIES: Final = 64
CLASSIFIERS: Final = "classifiers"
"""The name before those of all classifiers in the frozen weights of a job."""

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")


class StartWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights to begin with: those of ``policy`` at ``step`` of a job's ``checkpoint``.

    ``checkpoint`` is a directory or an address such as ``s3://bucket/prefix``. ``policy`` is the
    name that the policy had there; empty for the only policy of its job.
    """

    checkpoint: str
    step: int
    policy: str = ""


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several policies; a setting that is null is as the job has it.

    ``tp`` and ``min_dp`` are for the ranks of its own run, where each policy has one.

    A ``frozen`` policy is never trained: its weights are those that it begins with. It may speak in
    episodes, and environments may ask it for log-probabilities.
    """

    frozen: bool = False
    start: StartWeights | None = None
    model: ModelConfig | None = None
    pretrained: str | None = None
    warm_start: str | None = None
    lora: LoraConfig | None = None
    loss: LossConfig | None = None
    lr: float | None = None
    max_norm: float | None = None
    tp: int | None = None
    min_dp: int | None = None

    def __post_init__(self) -> None:
        trained = ("lora", "loss", "lr", "max_norm", "tp", "min_dp")
        useless = [name for name in trained if self.frozen and getattr(self, name) is not None]
        if useless:
            raise ValueError(f"a frozen policy has no {useless[0]}: it is never trained")


def check_policies(
    policies: Mapping[str, PolicyConfig], *, classifiers: Mapping[str, str], plays: bool
) -> None:
    """Raise ``ValueError`` for names and numbers that no job can have; it may have no ``policies``.

    ``plays``: there is an environment, which says who speaks, and asks ``classifiers``.
    """
    _check_classifiers(classifiers, policies, plays=plays)
    if not policies:
        return
    if len(policies) > MOST_POLICIES:
        raise ValueError(f"policies: {len(policies)} of them, at most {MOST_POLICIES} are possible")
    _check_names("policies", policies)
    trained = [name for name, each in policies.items() if not each.frozen]
    if not trained:
        raise ValueError("policies: all of them are frozen; at least one must be trained")
    if not plays and [*policies][:1] != trained:
        raise ValueError(
            "policies: without an environment only the first one speaks; set environment, or let "
            "the first policy be the only one that is not frozen"
        )


def _check_classifiers(
    classifiers: Mapping[str, str], policies: Collection[str], *, plays: bool
) -> None:
    if not classifiers:
        return
    _check_names("classifiers", classifiers)
    if taken := sorted({*policies} & {CLASSIFIERS, *classifiers}):
        raise ValueError(f"classifiers: there is a policy {taken[0]!r} too: give it another name")
    if not plays:
        raise ValueError("classifiers: only an environment asks them; set environment")


def _check_names(where: str, names: Collection[str]) -> None:
    for name in names:
        if not _NAME.fullmatch(name) or hasattr(nn.ModuleDict(), name):
            raise ValueError(
                f"{where}: {name!r} cannot be a name; choose one of lower-case letters, digits "
                "and _ that no method of torch's ModuleDict has"
            )
