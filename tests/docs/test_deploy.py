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
MANIFESTS = sorted(DEPLOY.glob("*.yaml"))
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


def objects() -> list[Object]:
    return [found for path in MANIFESTS for found in yaml.safe_load_all(path.read_text()) if found]


def jobs() -> Iterator[Object]:
    """Yield every Job, those inside a JobSet too, as an object of its own."""
    for found in objects():
        if found["kind"] == "Job":
            yield found
        for part in found["spec"].get("replicatedJobs", ()):
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
    assert {found["kind"] for found in objects()} == {"JobSet", "Job", "Service"}
    assert len(SCRIPTS) == 2


def test_objects_are_valid() -> None:
    plain = [found for found in objects() if found["kind"] != "JobSet"]
    for found in [*plain, *jobs()]:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


def test_a_wrong_field_is_noticed() -> None:
    job = next(jobs())
    job["spec"]["template"]["spec"]["containers"][0]["imagine"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagine"):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


def test_job_sets_have_the_fields_of_their_definition() -> None:
    for found in objects():
        if found["kind"] != "JobSet":
            continue
        assert found["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        assert set(found["spec"]) <= set(JOB_SET)
        for field, value in found["spec"].items():
            for part in value if isinstance(value, list) else [value]:
                assert set(part) <= JOB_SET[field], field


def test_commands_have_the_options_they_are_given() -> None:
    for pod in pods():
        for container in containers(pod):
            words = [*container["command"], *container.get("args", ())]
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


def _uncommented(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
