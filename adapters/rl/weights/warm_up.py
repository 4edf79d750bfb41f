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
from holdfast.adapters.rl.weights.initial import build_policy
from holdfast.adapters.rl.weights.places import MODEL
from holdfast.ckpt.checkpoints import catalog
from holdfast.elastic.errors import ConfigError

_FIRST_ORDINAL = 1 << 23
"""First ordinal of the warm-up prompts, far behind those of the reinforcement."""

_LR_WARMUP_STEPS = 20


def prepare(config: RLConfig) -> bool:
    """Make the warm starts unless their directories have one; return whether one was made now.

    Policies that name the same directory begin with the same weights. Raises ``ConfigError`` if
    their models differ.
    """
    wanted: dict[str, RLConfig] = {}
    for name, each in config.by_policy.items():
        if each.warm_start is None:
            continue
        first = wanted.setdefault(each.warm_start, each)
        if (first.model, first.pretrained) != (each.model, each.pretrained):
            raise ConfigError(
                f"policy {name} has another model than those with the same warm_start "
                f"{each.warm_start}: give it a directory of its own"
            )
    if not wanted and config.warm_start is None:
        raise ConfigError("the configuration names no warm_start directory to prepare")
    made = [_prepare(directory, each) for directory, each in wanted.items()]
    return any(made)


def _prepare(directory: str, config: RLConfig) -> bool:
    if catalog.latest(directory) is not None:
        return False
    task = make_task(config.task, seed=config.task_seed, exact_weight=config.exact_weight)
    ckpt.save(directory, {MODEL: warm_up(config, task)}, step=0)
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
