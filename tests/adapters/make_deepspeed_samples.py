"""Make the stored directories of DeepSpeed in ``tests/format/deepspeed``, and their digests.

    HOLDFAST_ADAPTERS=1 python tests/adapters/make_deepspeed_samples.py          all of them
    HOLDFAST_ADAPTERS=1 python tests/adapters/make_deepspeed_samples.py fp16     only this one

DeepSpeed's own tool joins each of them into a universal directory; the digests of its tensors are
the expectation. The one of `UNIVERSAL` is stored too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import environments

ROOT: Final = Path(__file__).parents[1] / "format" / "deepspeed"
JOB: Final = Path(__file__).with_name("deepspeed_job.py")

SAMPLES: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "zero1": (2, {"stage": 1}),
    "zero2": (3, {"stage": 2, "bf16": True, "zero": {"round_robin_gradients": True}}),
    "zero3": (2, {"stage": 3, "bf16": True, "zero": {"sub_group_size": 60}}),
    "fp16": (
        4,
        {
            "stage": 3,
            "fp16": {"initial_scale_power": 17, "hysteresis": 1},
            "zero": {"zero_hpz_partition_size": 2},
        },
    ),
}
"""The processes and the settings of each sample.

``zero3`` has several flat groups per group. The first step of ``fp16`` overflows and is skipped.
"""

UNIVERSAL: Final = "fp16"

DIGESTS: Final = """
import hashlib, json, sys
from pathlib import Path
import torch
found = {}
for path in sorted(Path(sys.argv[1], "zero").glob("*/*.pt")):
    content = torch.load(path, weights_only=False)
    tensor = content["param"] if isinstance(content, dict) else content
    tensor = torch.as_tensor(tensor).detach()
    digest = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
    found.setdefault(path.parent.name, {})[path.stem] = digest
print("DIGESTS", json.dumps(found))
"""


def main() -> None:
    """Write every sample anew, or those that are named."""
    ROOT.mkdir(parents=True, exist_ok=True)
    place = ROOT / "digests.json"
    digests = json.loads(place.read_text()) if place.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in sys.argv[1:] or SAMPLES:
            ranks, settings = SAMPLES[name]
            shutil.rmtree(ROOT / name, ignore_errors=True)
            made = Path(scratch) / name
            report = Path(scratch) / "report.json"
            told = {**settings, "first": 0, "last": 2, "save": str(made), "report": str(report)}
            run("torchrun", f"--nproc-per-node={ranks}", "--standalone", str(JOB), json.dumps(told))
            keep(made, ROOT / name)
            joined = made / "global_step2_universal"
            tool = ("python", "-m", "deepspeed.checkpoint.ds_to_universal")
            options = (
                *("--input_folder", str(made / "global_step2")),
                *("--output_folder", str(joined), "--inject_missing_state"),
                *("--num_extract_workers", "1", "--num_merge_workers", "1"),
            )
            run(*tool, *options)
            said = run("python", "-c", DIGESTS, str(joined))
            digests[name] = json.loads(said.partition("DIGESTS ")[2].splitlines()[0])
            if name == UNIVERSAL:
                shutil.rmtree(ROOT / "universal", ignore_errors=True)
                shutil.copytree(joined, ROOT / "universal" / joined.name)
                (ROOT / "universal" / "latest_universal").write_text(joined.name)
    place.write_text(json.dumps(digests, indent=1) + "\n")


def keep(made: Path, target: Path) -> None:
    """Copy a checkpoint without the scripts that DeepSpeed puts beside it."""
    shutil.copytree(made, target, ignore=shutil.ignore_patterns("*.py"))


def run(program: str, *arguments: str) -> str:
    """Run a program of the environment; return what it printed."""
    folder = environments.python("deepspeed").parent
    return subprocess.run(
        [str(folder / program), *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environments.variables("deepspeed"),
    ).stdout


if __name__ == "__main__":
    main()
