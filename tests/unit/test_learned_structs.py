"""Structs that several threads decode are known to msgspec before the first thread starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What is known needs no annotations any more; what is not would be looked up, and fails.
CODE = """
import importlib, sys
import msgspec
module = importlib.import_module(sys.argv[1])
kinds = [k for k in vars(module).values() if isinstance(k, type) and k.__module__ == sys.argv[1]]
structs = [k for k in kinds if issubclass(k, msgspec.Struct)]
assert structs
for kind in structs:
    kind.__annotations__ = dict.fromkeys(kind.__struct_fields__, "NoSuchType")
for kind in structs:
    msgspec.json.Decoder(kind)
"""


@pytest.mark.parametrize(
    "module",
    [
        "holdfast.ckpt.recovery.fallback",
        "holdfast.ckpt.geometry.shard_index",
        "holdfast.ckpt.memory.records",
        "holdfast.ckpt.format.manifest",
        "holdfast.ckpt.checkpoints.commit",
        "holdfast.ckpt.sidecar.core.messages",
        "holdfast.ckpt.sidecar.logs.segment",
        "holdfast.elastic.coordinator.base",
        "holdfast.elastic.membership.records",
        "holdfast.adapters.rl.environments.base",
        "holdfast.adapters.rl.server.messages",
        "holdfast.adapters.rl.samples.trajectory",
    ],
)
def test_a_modules_structs_are_learned_when_it_is_imported(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, module], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
