"""The launchers that a job file can be for, and which of them is at hand. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A launcher's job file: its name among those of Holdfast's documentation, and the next step.

    ``variables`` are those of the environment, and ``programs`` those on the path, that show that
    the launcher is at hand. ``{file}`` in ``start`` stands for the file that was written,
    ``{script}`` for the training script.
    """

    source: str
    start: str
    title: str
    variables: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()


LOCAL: Final = "local"

LAUNCHERS: Final[Mapping[str, JobFile]] = {
    "slurm": JobFile(
        source="slurm-holdfast-run.sh",
        start="sbatch {file}",
        title="one `holdfast run` per node, under Slurm",
        variables=("SLURM_JOB_ID", "SLURM_CONF"),
        programs=("sbatch",),
    ),
    "slurm-torchrun": JobFile(
        source="slurm-torchrun.sh",
        start="sbatch {file}",
        title="torchrun and sidecars, under Slurm",
    ),
    "ray": JobFile(
        source="ray.sh",
        start="bash {file}",
        title="nodes that Ray places",
        variables=("RAY_ADDRESS", "RAY_JOB_ID"),
        programs=("ray",),
    ),
    "skypilot": JobFile(
        source="skypilot-task.yaml",
        start="sky launch {file}",
        title="machines of a SkyPilot task",
        programs=("sky",),
    ),
    "kubernetes": JobFile(
        source="holdfast-run-job.yaml",
        start="kubectl apply -f {file}",
        title="a Job with `holdfast run`, on Kubernetes",
        variables=("KUBERNETES_SERVICE_HOST",),
        programs=("kubectl",),
    ),
    "kubernetes-torchrun": JobFile(
        source="torchrun-jobset.yaml",
        start="kubectl apply -f {file}",
        title="a JobSet with torchrun and sidecars, on Kubernetes",
    ),
    "kubeflow": JobFile(
        source="kubeflow-runtime.yaml",
        start="kubectl apply -f {file}",
        title="a runtime of Kubeflow Trainer",
    ),
    "torchrun": JobFile(
        source="torchrun.sh",
        start="HEAD=first-machine bash {file}",
        title="torchrun and a sidecar on each machine",
        variables=("TORCHELASTIC_RUN_ID",),
    ),
    LOCAL: JobFile(
        source="", start="holdfast run {script}", title="`holdfast run` on this machine"
    ),
}
"""Name of a launcher -> its job file, those that are looked for first at the top."""


def at_hand(environment: Collection[str], programs: Collection[str]) -> tuple[str, str]:
    """Return the launcher at hand, and what shows it.

    A variable, which says that a process runs there, counts more than a program on the path.
    """
    for name, each in LAUNCHERS.items():
        for variable in each.variables:
            if variable in environment:
                return name, f"{variable} is set"
    for name, each in LAUNCHERS.items():
        for program in each.programs:
            if program in programs:
                return name, f"{program} is on the path"
    return LOCAL, "no other launcher was found"
