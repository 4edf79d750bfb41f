"""Real vLLM servers with a tiny Llama, each a group of processes of its own, and its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import environments
import torch

from holdfast.adapters.rl.engines.built_in import BuiltInEngine
from holdfast.adapters.rl.policy.pretrained import load_pretrained
from holdfast.tools.vllm.llama import LIMITS, save_llama, tiny_llama
from holdfast.tools.vllm.servers import SLOTS, VLLMServers


def weights_of(version: int) -> Mapping[str, torch.Tensor]:
    """Return the weights of a policy version."""
    weights: Mapping[str, torch.Tensor] = tiny_llama(version).state_dict()
    return weights


def servers_in(folder: Path) -> VLLMServers:
    """Return servers of the first version's model, which run in vLLM's environment."""
    program = environments.python("vllm").parent / "vllm"
    return VLLMServers(
        program=str(program),
        folder=folder,
        model=save_llama(folder),
        env=environments.variables("vllm"),
    )


def built_in(servers: VLLMServers, version: int = 1) -> BuiltInEngine:
    """Return the included engine with the same model."""
    policy = load_pretrained(str(servers.model), context=LIMITS.context)
    made = BuiltInEngine(policy, limits=LIMITS, slots=SLOTS)
    weights = {f"lm.{name}": each for name, each in weights_of(version).items()}
    made.load(weights, version=version)
    return made
