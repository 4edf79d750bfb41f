"""The manifests and scripts of docs/deploy are valid, and call programs with existing options."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import get_args_parser

from holdfast.tools.cli import build_parser, load

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
TASK = DEPLOY / "skypilot-task.yaml"
MANIFESTS = sorted(path for path in DEPLOY.glob("*.yaml") if path != TASK)
SCRIPTS = sorted(DEPLOY.glob("*.sh"))
KUBERNETES = "1.33"
Object = dict[str, Any]

JOB_SET = {
    "network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "replicatedJobs": {"name", "replicas", "template", "groupName", "dependsOn"},
    "suspend": set(),
    "successPolicy": {"operator", "targetReplicatedJobs"},
}
"""The fields of a JobSet's spec (jobset.x-k8s.io/v1alpha2) that we may use, and theirs."""

RUNTIME = {
    "mlPolicy": {"numNodes", "torch", "mpi", "jax", "xgboost", "flux"},
    "podGroupPolicy": {"coscheduling", "volcano"},
    "template": {"metadata", "spec"},
}
"""The fields of a runtime's spec (trainer.kubeflow.org/v1alpha1, of Trainer 2.2), and theirs."""

SKYPILOT = {
    *("name", "num_nodes", "workdir", "resources", "envs", "secrets", "file_mounts", "volumes"),
    *("setup", "run"),
}
SKYPILOT_RESOURCES = {
    *("infra", "cloud", "region", "zone", "instance_type", "cpus", "memory", "accelerators"),
    *("use_spot", "job_recovery", "disk_size", "disk_tier", "image_id", "ports", "labels"),
}
"""The fields of a SkyPilot task and of its resources that we may use (SkyPilot 0.9 and later)."""


def objects() -> list[Object]:
    return [found for path in MANIFESTS for found in yaml.safe_load_all(path.read_text()) if found]


def jobs() -> Iterator[Object]:
    """Yield every Job, those inside a JobSet too, as an object of its own."""
    for found in objects():
        if found["kind"] == "Job":
            yield found
        spec = found["spec"]
        if found["kind"] == "ClusterTrainingRuntime":
            spec = spec["template"]["spec"]
        for part in spec.get("replicatedJobs", ()):
            name = f"{found['metadata']['name']}-{part['name']}"
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}}
            yield {**job, **part["template"]}


def pods() -> Iterator[Object]:
    for job in jobs():
        yield job["spec"]["template"]["spec"]


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def check_command(words: list[str]) -> None:
    """Parse a command as the program itself would, which exits when it does not understand."""
    if words[0] == "holdfast":
        build_parser(words[1], load(words[1])).parse_args(words[1:])
    elif words[0] == "torchrun":
        get_args_parser().parse_args(words[1:])
    else:
        assert words[0] in ("sh", "test")


def test_every_kind_of_launch_is_there() -> None:
    assert {found["kind"] for found in objects()} == {
        "ClusterTrainingRuntime",
        "JobSet",
        "Job",
        "Service",
    }
    assert len(SCRIPTS) == 4


def test_objects_are_valid() -> None:
    custom = {"JobSet", "ClusterTrainingRuntime"}
    plain = [found for found in objects() if found["kind"] not in custom]
    for found in [*plain, *jobs()]:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


def test_a_wrong_field_is_noticed() -> None:
    job = next(jobs())
    job["spec"]["template"]["spec"]["containers"][0]["imagine"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagine"):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def test_job_sets_have_the_fields_of_their_definition() -> None:
    specs = [found["spec"] for found in of_kind("JobSet", "jobset.x-k8s.io/v1alpha2")]
    runtimes = of_kind("ClusterTrainingRuntime", "trainer.kubeflow.org/v1alpha1")
    for spec in [*specs, *(found["spec"]["template"]["spec"] for found in runtimes)]:
        check_fields(spec, JOB_SET)


def test_a_runtime_of_kubeflow_has_the_fields_and_the_names_that_its_controller_knows() -> None:
    for found in of_kind("ClusterTrainingRuntime", "trainer.kubeflow.org/v1alpha1"):
        check_fields(found["spec"], RUNTIME)
        (part,) = found["spec"]["template"]["spec"]["replicatedJobs"]
        labels = part["template"]["metadata"]["labels"]
        assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
        (container,) = part["template"]["spec"]["template"]["spec"]["containers"]
        assert part["name"] == container["name"] == "node"


def test_kueue_may_admit_as_few_pods_as_the_job_may_begin_with() -> None:
    (job,) = of_kind("Job", "batch/v1")
    notes = job["metadata"]["annotations"]
    assert "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (nodes,) = (word for word in container["args"] if word.startswith("--nnodes="))
    least, most = nodes.removeprefix("--nnodes=").split(":")
    assert notes["kueue.x-k8s.io/job-min-parallelism"] == least
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == int(most)
    assert notes["kueue.x-k8s.io/job-completions-equal-parallelism"] == "true"


def test_a_skypilot_task_has_the_fields_that_skypilot_knows() -> None:
    task = yaml.safe_load(TASK.read_text())
    assert set(task) <= SKYPILOT
    assert set(task["resources"]) <= SKYPILOT_RESOURCES
    subprocess.run(["bash", "-n", "-c", task["run"]], check=True)
    (call,) = calls_in(task["run"])
    check_command(shlex.split(call))


def test_commands_have_the_options_they_are_given() -> None:
    for pod in pods():
        for container in containers(pod):
            words = [*container["command"], *container.get("args", ())]
            if words[:2] == ["sh", "-c"]:  # the words after the script are its arguments
                (call,) = calls_in(words[2].replace('"$@"', ""))
                words = [*shlex.split(call), *words[4:]]
            check_command([word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in words])
            hook = container.get("lifecycle", {}).get("preStop", {}).get("exec")
            if hook:
                check_command(hook["command"])


def test_snapshots_lie_in_memory_that_all_containers_share_and_that_counts() -> None:
    for pod in pods():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in containers(pod):
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
            resources = container["resources"]
            assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_somebody_is_told_before_a_pod_ends() -> None:
    for pod in pods():
        assert any("preStop" in each.get("lifecycle", {}) for each in containers(pod))


def test_the_workers_of_a_pod_find_its_sidecar() -> None:
    for pod in pods():
        for sidecar in pod.get("initContainers", ()):
            file = sidecar["args"][sidecar["args"].index("--file") + 1]
            for container in pod["containers"]:
                env = {each["name"]: each.get("value") for each in container["env"]}
                assert env["HOLDFAST_SIDECAR"] == file


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_well_formed_and_their_commands_too(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text().replace("\\\n", " ")
    calls = re.findall(r'(?:^|[\s"(])((?:holdfast|torchrun) [^"\n]*)', _uncommented(text))
    assert calls
    for call in calls:
        check_command(shlex.split(call.removesuffix(")").replace("'", "")))


def calls_in(text: str) -> list[str]:
    """Return the calls of `holdfast` in a shell's text, with a number for each variable."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"^\s*(?:exec )?(holdfast .*)$", joined, re.MULTILINE)
    return [re.sub(r"\$\w+", "1", call) for call in found]


def of_kind(kind: str, version: str) -> list[Object]:
    """Return the objects of a kind, all of this version of its interface; there is one at least."""
    found = [each for each in objects() if each["kind"] == kind]
    assert {each["apiVersion"] for each in found} == {version}
    return found


def check_fields(spec: Object, known: dict[str, set[str]]) -> None:
    """Check that a spec has only known fields, and these only known ones."""
    assert set(spec) <= set(known)
    for field, value in spec.items():
        for part in value if isinstance(value, list) else [value]:
            assert not isinstance(part, dict) or set(part) <= known[field], field


def _uncommented(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
