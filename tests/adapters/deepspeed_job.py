"""A small training run with DeepSpeed, one process of several; its argument is a JSON object.

It needs DeepSpeed and torch, and nothing of Holdfast. The settings name the stage, the directories
to load and to save and the steps to take. Rank 0 writes the losses, and the whole state at the end.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
warnings.filterwarnings("ignore")

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.utils import (  # noqa: E402
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)

BATCH = 12
MOMENTS = ("exp_avg", "exp_avg_sq")
WORDS = 13


class Net(torch.nn.Module):
    """Tied, frozen and odd-shaped parameters, and a buffer of whole numbers."""

    def __init__(self, tied: bool, seed: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 7)
        self.up = torch.nn.Linear(7, 11)
        self.down = torch.nn.Linear(11, 7)
        self.head = torch.nn.Linear(7, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 7) + seed, requires_grad=False)
        self.register_buffer("count", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.scale
        return self.head(hidden + self.down(torch.tanh(self.up(hidden))))


def engine_of(settings: dict[str, Any]) -> Any:
    """Return an engine with two parameter groups, Adam and a schedule."""
    seed = settings.get("seed", 0)
    if "fp16" in settings:  # torch computes in it on any CPU; DeepSpeed asks for fast instructions
        type(get_accelerator()).is_fp16_supported = lambda _: True
    torch.manual_seed(seed)
    net = Net(settings.get("tied", True), seed)
    if settings.get("universal"):  # an engine does not load frozen parameters and buffers
        tag = Path(settings["load"], "latest_universal").read_text()
        path = Path(settings["load"], tag, "mp_rank_00_model_states.pt")
        net.load_state_dict(torch.load(path, weights_only=True)["module"], strict=False)
    parameters = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in parameters if "bias" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in parameters if "bias" in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=2e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    config = {
        "train_batch_size": BATCH,
        "zero_optimization": {"stage": settings["stage"], **settings.get("zero", {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        **({"bf16": {"enabled": True}} if settings.get("bf16") else {}),
        **({"fp16": {"enabled": True, **settings["fp16"]}} if "fp16" in settings else {}),
        **({"checkpoint": {"load_universal": True}} if settings.get("universal") else {}),
    }
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    return engine


def train(engine: Any, steps: range) -> list[float]:
    """Take the steps; each has the same samples, however many ranks share them."""
    world, rank, losses = dist.get_world_size(), dist.get_rank(), []
    for step in steps:
        tokens = torch.randint(0, WORDS, (BATCH, 3), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(world)[rank]
        logits = engine(mine).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine.flatten())
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return the whole weights and moments, by DeepSpeed's own functions."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[name] = safe_get_full_fp32_param(parameter).clone()
            for key in MOMENTS if engine.zero_optimization_stage() == 3 else ():
                found[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    return found


def own_steps(engine: Any) -> None:
    """Give each group a step of its own, which DeepSpeed's stage 3 does not when it loads."""
    for state in engine.optimizer.optimizer.state.values():
        state["step"] = state["step"].clone()


def main() -> None:
    """Load, train, save and report, as the settings say."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, for minutes
    deepspeed.init_distributed(dist_backend="gloo")
    engine, report = engine_of(settings), {}
    if settings.get("load"):
        _, client = engine.load_checkpoint(settings["load"], tag=settings.get("tag"))
        if settings.get("own_steps"):
            own_steps(engine)
        if settings.get("universal") and "fp16" in settings:  # an engine takes no scale from there
            vars(engine.optimizer.loss_scaler).update(client["deepspeed_loss_scaler"])
        report = {"client": client.get("tokens"), "steps": engine.global_steps}
    report["losses"] = train(engine, range(settings["first"], settings["last"]))
    report["groups"] = [
        {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        for group in engine.optimizer.param_groups
    ]
    if settings.get("save"):
        client = {"tokens": 1234, "noise": {"state": torch.arange(4), "names": ["a", "b"]}}
        engine.save_checkpoint(settings["save"], client_state=client)
    if settings.get("losses_of"):  # steps after saving, to compare with
        report["after"] = train(engine, range(settings["last"], settings["losses_of"]))
    report["scaling"] = [engine.skipped_steps, engine.optimizer.cur_scale]
    state = state_of(engine) if settings.get("truth") else {}
    if dist.get_rank() == 0:
        Path(settings["report"]).write_text(json.dumps(report))
        if state:
            torch.save(state, settings["truth"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
