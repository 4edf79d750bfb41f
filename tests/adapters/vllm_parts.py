"""Real vLLM servers with a tiny Llama, each a group of processes of its own, and its weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import environments
import httpx2
import torch

from holdfast.adapters.rl.engines.built_in import BuiltInEngine
from holdfast.adapters.rl.engines.vllm import VLLMServer
from holdfast.adapters.rl.engines.weight_folder import WeightFolder
from holdfast.adapters.rl.policy.pretrained import load_pretrained
from holdfast.adapters.rl.samples.trajectory import TurnLimits

END: Final = 10
LIMITS: Final = TurnLimits(end=END, context=96, max_new_tokens=48)
SLOTS: Final = 4
START_S: Final = 1200.0

_FLAGS: Final = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "96"),
    *("--max-num-seqs", "8", "--distributed-executor-backend", "uni", "--host", "127.0.0.1"),
    *("--worker-extension-cls", "holdfast.adapters.vllm.worker.HoldfastWorker"),
    *("--logits-processors", "holdfast.adapters.vllm.noise:PlacedNoise"),
)


def made_llama(seed: int) -> Any:
    """Return a tiny Llama with the weights that a seed makes; its heads have 32 numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).float()


def weights_of(version: int) -> Mapping[str, torch.Tensor]:
    """Return the weights of a policy version."""
    weights: Mapping[str, torch.Tensor] = made_llama(version).state_dict()
    return weights


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Starts servers of the model in ``folder``; those with checkpoints share a root there."""

    folder: Path

    @classmethod
    def of(cls, folder: Path) -> Servers:
        """Save the first version's model."""
        made_llama(1).save_pretrained(folder / "llama")
        return cls(folder=folder)

    @property
    def root(self) -> Path:
        """The root of checkpoints from which the servers read weights."""
        return self.folder / "weights"

    def built_in(self, version: int = 1) -> BuiltInEngine:
        """Return the included engine with the same model."""
        policy = load_pretrained(str(self.folder / "llama"), context=LIMITS.context)
        made = BuiltInEngine(policy, limits=LIMITS, slots=SLOTS)
        weights = {f"lm.{name}": each for name, each in weights_of(version).items()}
        made.load(weights, version=version)
        return made

    def start(self, port: int, **place: str) -> subprocess.Popen[bytes]:
        """Start a server, which reads weights at a place; it is not ready yet."""
        place = place or {"checkpoints": str(self.root)}
        program = environments.python("vllm").parent / "vllm"
        config = json.dumps({"holdfast": place})
        with (self.folder / f"{port}.log").open("ab") as log:
            return subprocess.Popen(
                [
                    *(str(program), "serve", str(self.folder / "llama"), "--port", str(port)),
                    *(*_FLAGS, "--additional-config", config),
                ],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=environments.variables("vllm"),
                start_new_session=True,
            )

    def wait(self, port: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until a server answers."""
        with httpx2.Client(timeout=START_S, trust_env=False) as client:
            while True:
                with suppress(httpx2.HTTPError):
                    if client.get(f"{url_of(port)}/v1/holdfast").status_code == 200:
                        return
                log = (self.folder / f"{port}.log").read_text(errors="replace")
                assert process.poll() is None, log[-3000:]
                threading.Event().wait(0.2)

    @contextmanager
    def serving(self, *ports: int, **place: str) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Run servers while the body lasts."""
        started: list[subprocess.Popen[bytes]] = []
        try:
            started += [self.start(port, **place) for port in ports]
            for port, process in zip(ports, started, strict=True):
                self.wait(port, process)
            yield started
        finally:
            for process in started:
                kill(process)


def url_of(port: int) -> str:
    """Return the address of a server."""
    return f"http://127.0.0.1:{port}"


def engine_of(port: int, folder: WeightFolder | None = None, **given: Any) -> VLLMServer:
    """Return the engine of a server."""
    given = {"limits": LIMITS, "capacity": SLOTS, "weights": folder, **given}
    return VLLMServer(url=url_of(port), **given)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill all of a server's processes."""
    tell(process, signal.SIGKILL)
    process.wait()


def tell(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to all of a server's processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
