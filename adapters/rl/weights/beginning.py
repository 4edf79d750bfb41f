"""The weights that a policy begins with: a warm start's, or another policy's from a checkpoint."""

from __future__ import annotations

from torch import nn

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.policy.policy import fill, parameter_names
from holdfast.adapters.rl.policy.settings import StartWeights
from holdfast.adapters.rl.policy.team import prefix_of
from holdfast.adapters.rl.weights.places import MODEL
from holdfast.ckpt.checkpoints import catalog
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.state.saved import read_tensors
from holdfast.elastic.errors import ConfigError


def load_beginning(policy: nn.Module, config: RLConfig) -> None:
    """Fill ``policy`` with the weights that its settings name, if any.

    Raises ``ConfigError`` if they are not there, or are not those of such a policy.
    """
    if config.start is not None:
        load_start(policy, config.start)
    elif config.warm_start is not None:
        load_warm_start(policy, config.warm_start)


def load_start(policy: nn.Module, start: StartWeights) -> None:
    """Fill ``policy`` from the checkpoint of a job."""
    where = f"start of policy {start.policy!r}" if start.policy else "start"
    try:
        step = catalog.choose(start.checkpoint, start.step)
        _load(policy, start.checkpoint, step, policy=start.policy)
    except NotFoundError as error:
        raise ConfigError(
            f"{where}: {error}; name a checkpoint that an RL job wrote, a step that it kept, and "
            "a policy of this kind that it trained whole"
        ) from error


def load_warm_start(policy: nn.Module, root: str) -> None:
    """Fill ``policy`` from a warm start."""
    step = catalog.latest(root)
    if step is None:
        raise ConfigError(
            f"{root}: no warm start there; make it with: "
            "python -m holdfast.rl --warm-up --config FILE"
        )
    _load(policy, root, step, policy="")


def load_reference(policy: nn.Module, root: str, *, step: int | None) -> None:
    """Fill ``policy`` from ``step`` of the checkpoints of a job with one policy, or a warm start.

    Raises ``ConfigError`` if there is none that fits.
    """
    try:
        _load(policy, root, catalog.choose(root, step), policy="")
    except NotFoundError as error:
        raise ConfigError(
            f"loss.kl.checkpoint: {error}; name a checkpoint that an RL job with one policy wrote, "
            "or a warm start, and a step that it has"
        ) from error


def _load(module: nn.Module, root: str, step: int, *, policy: str) -> None:
    prefix, names = f"{MODEL}.{prefix_of(policy)}", parameter_names(module)
    with StoreSource(root, step) as source:
        tensors = read_tensors(source, [f"{prefix}{name}" for name in names])
    for name, parameter in module.named_parameters():
        found = tensors[f"{prefix}{name}"]
        if found.shape != parameter.shape:
            raise ConfigError(
                f"{root}: {prefix}{name} has the shape {[*found.shape]}, and the policy's has "
                f"{[*parameter.shape]}: give both policies the same model"
            )
    fill(module, {name: tensors[f"{prefix}{name}"] for name in names})
