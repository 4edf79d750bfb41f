"""A writer of ZeRO directories without DeepSpeed's classes: small, and easy to damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

SHAPES: list[dict[str, tuple[int, ...]]] = [{"w": (3, 5), "v": (7,)}, {"b": (3,)}]
"""The parameters of each group."""

Change = Callable[[dict[str, Any]], None]


def parameters() -> dict[str, torch.Tensor]:
    """Return the whole parameters."""
    torch.manual_seed(3)
    return {name: torch.randn(shape) for group in SHAPES for name, shape in group.items()}


def state_of(name: str, key: str) -> torch.Tensor:
    """Return a whole state of a parameter."""
    return parameters()[name] * {"exp_avg": 2.0, "exp_avg_sq": 3.0}[key]


def write_zero(
    root: Path,
    *,
    stage: int,
    ranks: int = 2,
    model: Change | None = None,
    optim: Change | None = None,
) -> Path:
    """Write a tag below ``root``, and ``latest``. ``model`` and ``optim`` change the contents."""
    tag = root / "global_step4"
    tag.mkdir(parents=True)
    (root / "latest").write_text("global_step4")
    for rank in range(ranks):
        content = _model(stage, ranks)
        if model:
            model(content)
        if stage == 3 or rank == 0:
            start = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            torch.save(content, tag / f"{start}mp_rank_00_model_states.pt")
        content = _optim(stage, rank, ranks)
        if optim:
            optim(content)
        torch.save(content, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return tag


def _model(stage: int, ranks: int) -> dict[str, Any]:
    whole = parameters() if stage < 3 else {n: torch.empty(0) for n in parameters()}
    return {
        "module": {**whole, "count": torch.arange(3)},
        "buffer_names": ["count"],
        "optimizer": None,
        "param_shapes": [{n: torch.Size(s) for n, s in group.items()} for group in SHAPES],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": 4,
        "global_samples": 48,
        "skipped_steps": 0,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
    }


def _optim(stage: int, rank: int, ranks: int) -> dict[str, Any]:
    flats = [_flat(group, parameters(), stage, rank, ranks) for group in SHAPES]
    states = {
        number: {
            "step": torch.tensor(4.0),
            **{
                key: _flat(group, {n: state_of(n, key) for n in group}, stage, rank, ranks)
                for key in ("exp_avg", "exp_avg_sq")
            },
        }
        for number, group in enumerate(SHAPES)
    }
    base = {
        "state": states,
        "param_groups": [
            {"lr": 0.5, "weight_decay": number / 8, "params": [number]}
            for number in range(len(SHAPES))
        ],
    }
    if stage == 3:
        inner = {"optimizer_state_dict": base, "fp32_flat_groups": flats, "partition_count": ranks}
    else:
        inner = {
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": flats,
            "partition_count": [ranks] * len(SHAPES),
        }
    inner |= {"zero_stage": stage, "loss_scaler": None, "dynamic_loss_scale": False}
    return {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.19.8"}


def _flat(
    group: Mapping[str, tuple[int, ...]],
    whole: Mapping[str, torch.Tensor],
    stage: int,
    rank: int,
    ranks: int,
) -> torch.Tensor:
    vectors = [whole[name].flatten() for name in group]
    if stage < 3:
        vectors = [torch.cat(vectors)]
    parts = []
    for vector in vectors:
        size = -(-vector.numel() // ranks)
        padded = torch.cat([vector, torch.full((size * ranks - vector.numel(),), torch.nan)])
        parts.append(padded[rank * size : (rank + 1) * size])
    return torch.cat(parts)
