"""The supervised warm-up: one process, a pure function of the configuration.

Run by hand: ``python -m holdfast.rl --warm-up --config FILE``.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from holdfast import ckpt
from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.environments.task import Task, make_task
from holdfast.adapters.rl.policy.policy import fill, parameter_names
from holdfast.adapters.rl.weights.initial import build_policy
from holdfast.adapters.rl.weights.places import MODEL
from holdfast.ckpt.checkpoints import catalog
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.state.saved import read_tensors
from holdfast.elastic.errors import ConfigError

_FIRST_ORDINAL = 1 << 23
"""First ordinal of the warm-up prompts, far behind those of the reinforcement."""

_LR_WARMUP_STEPS = 20


def prepare(config: RLConfig) -> bool:
    """Make the warm start unless its directory has one; return whether it was made now."""
    if config.warm_start is None:
        raise ConfigError("the configuration names no warm_start directory to prepare")
    if catalog.latest(config.warm_start) is not None:
        return False
    task = make_task(config.task, seed=config.task_seed, exact_weight=config.exact_weight)
    ckpt.save(config.warm_start, {MODEL: warm_up(config, task)}, step=0)
    return True


def warm_up(config: RLConfig, task: Task) -> nn.Module:
    """Return a model trained on right answers for the configured number of steps."""
    torch.set_num_threads(1)
    model = build_policy(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.warm.lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    for step in range(config.warm.steps):
        tokens, targets = _examples(config, task, step=step)
        for group in optimizer.param_groups:
            group["lr"] = config.warm.lr * min(1.0, (step + 1) / _LR_WARMUP_STEPS)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
    return model


def load_warm_start(model: nn.Module, root: str) -> None:
    """Fill ``model`` from a warm start. Raises ``ConfigError`` if there is none that fits."""
    step = catalog.latest(root)
    if step is None:
        raise ConfigError(
            f"{root}: no warm start there; make it with: "
            "python -m holdfast.rl --warm-up --config FILE"
        )
    _load(model, root, step=step)


def load_reference(model: nn.Module, root: str, *, step: int | None) -> None:
    """Fill ``model`` from ``step`` of the checkpoints of an RL job, or of a warm start.

    Raises ``ConfigError`` if there is none that fits.
    """
    try:
        _load(model, root, step=catalog.choose(root, step))
    except NotFoundError as error:
        raise ConfigError(
            f"loss.kl.checkpoint: {error}; name a checkpoint that an RL job wrote, or a warm "
            "start, and a step that it has"
        ) from error


def _load(model: nn.Module, root: str, *, step: int) -> None:
    names = parameter_names(model)
    with StoreSource(root, step) as source:
        tensors = read_tensors(source, [f"{MODEL}.{name}" for name in names])
    for name, parameter in model.named_parameters():
        shape = list(tensors[f"{MODEL}.{name}"].shape)
        if shape != list(parameter.shape):
            raise ConfigError(
                f"{root}: {name} has the shape {shape} there and {list(parameter.shape)} here: "
                "give weights of the same model"
            )
    fill(model, {name: tensors[f"{MODEL}.{name}"] for name in names})


def _examples(config: RLConfig, task: Task, *, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [rows, context] and targets [rows, context - 1]; -100 where not the answer."""
    rows, tokenizer = config.warm.rows, config.tokenizer
    tokens = torch.zeros(rows, config.model.context, dtype=torch.long)
    targets = torch.full((rows, config.model.context - 1), -100)
    for row in range(rows):
        problem = task.train(_FIRST_ORDINAL + step * rows + row)
        prompt, right = map(tokenizer.encode, (problem.prompt, problem.answer))
        text = (*prompt, *right, tokenizer.end)
        tokens[row, : len(text)] = torch.tensor(text)
        answer = slice(len(prompt), len(text))
        targets[row, answer.start - 1 : answer.stop - 1] = tokens[row, answer]
    return tokens, targets
