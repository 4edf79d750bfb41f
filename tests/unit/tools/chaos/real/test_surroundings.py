"""The words that put a command into poor surroundings, and scenarios that ask for wrong ones."""

from __future__ import annotations

import pwd
import shlex
from pathlib import Path
from typing import Any

import pytest

from holdfast.tools.chaos.real import surroundings
from holdfast.tools.chaos.real.surroundings import unknown_user, within, wrapped
from holdfast.tools.chaos.real.world import run
from holdfast.tools.chaos.scenarios.scenario import JobSurroundings, ScenarioError, parse

FOLDER = Path("/home/me/out of it")
MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 27 0:21 / /proc rw - proc proc rw
24 27 0:6 / /dev rw - devtmpfs devtmpfs rw
25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw
28 27 8:1 / /home/my\\040disk rw - ext4 /dev/sdb rw
29 27 8:2 / /home/me/out\\040of\\040it rw - ext4 /dev/sdc rw
"""


def script(wanted: JobSurroundings, *, root: bool = True) -> tuple[list[str], list[str]]:
    """Return the commands that come before the job's, and the words after them."""
    words = wrapped(wanted, folder=FOLDER, work=FOLDER, mountinfo=MOUNTS, root=root)
    at = words.index("-c")
    assert words[at + 2] == "sh"
    *steps, last = words[at + 1].split(" && ")
    assert last == 'exec "$@"'
    return steps, [*words[:at], *words[at + 3 :]]


def test_the_surroundings_of_this_machine_need_no_words() -> None:
    assert within(JobSurroundings(), ("a", "b"), folder=FOLDER, work=FOLDER) == ("a", "b")


def test_all_but_the_kernels_own_and_the_folder_becomes_read_only() -> None:
    steps, _ = script(JobSurroundings(read_only=True))
    assert [shlex.split(step) for step in steps] == [
        ["mount", "--bind", str(FOLDER), str(FOLDER)],
        ["mount", "-o", "remount,bind,ro", "/"],
        ["mount", "-o", "remount,bind,ro", "/home/my disk"],
    ]


def test_sizes_and_limits_are_those_that_were_asked_for() -> None:
    steps, _ = script(JobSurroundings(open_files=256, shared_memory_mib=64, temporary_kib=96))
    assert shlex.split(steps[0])[-3:] == ["size=64m,mode=1777", "tmpfs", "/dev/shm"]
    assert shlex.split(steps[1])[-3:] == ["size=96k,mode=1777", "tmpfs", f"{FOLDER}/tmp"]
    assert steps[2:] == ["ulimit -n 256", f"export TMPDIR={shlex.quote(f'{FOLDER}/tmp')}"]


def test_a_user_without_rights_gets_them_in_a_namespace_of_users() -> None:
    _, words = script(JobSurroundings(open_files=256), root=False)
    assert words == ["unshare", "--mount", "--user", "--map-root-user", "sh"]


def test_a_homeless_user_is_unknown_and_has_no_home() -> None:
    _, words = script(JobSurroundings(homeless=True))
    user = unknown_user()
    with pytest.raises(KeyError):
        pwd.getpwuid(user)
    assert [f"--map-user={user}", "-u", "HOME"] == [
        words[words.index("--user") + 1],
        *words[words.index("HOME") - 1 : words.index("HOME") + 1],
    ]


def test_surroundings_that_cannot_be_made_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = ("sh", "-c", "echo mount: permission denied >&2; exit 32", "sh")
    monkeypatch.setattr(surroundings, "wrapped", lambda *words, **named: refused)
    with pytest.raises(ScenarioError, match=r"permission denied\): run it as root"):
        within(JobSurroundings(read_only=True), ("true",), folder=tmp_path, work=tmp_path)


@pytest.mark.parametrize(
    ("workload", "wrong"),
    [
        ({"return_s": 1.0}, "return_s is for nodes"),
        ({"return_s": -1.0}, "give 0 or more seconds"),
        ({"return_s": 1.0, "coordinator": "etcd", "nodes": {"a": {"t": 1}}}, "leave one out"),
        ({"surroundings": {"read_only": True}, "nodes": {"a": {"t": 1}}}, "without nodes"),
        ({"surroundings": {"open_files": 0}}, "surroundings.open_files is 0"),
    ],
)
def test_a_scenario_that_does_not_fit_together_is_refused(
    workload: dict[str, Any], wrong: str
) -> None:
    document = {"name": "wrong", "about": "", "workload": {"command": ["true"], **workload}}
    with pytest.raises(ScenarioError, match=wrong):
        parse(document, source="test")


@pytest.mark.parametrize("part", ["launcher", "coordinator"])
def test_without_processes_of_their_own_launcher_and_coordinator_are_not_hit(
    part: str, tmp_path: Path
) -> None:
    kill = {"kind": "kill", "target": {"part": part}, "when": {"step": 1}}
    load = {"command": ["true"], "nodes": {"a": {"trainer": 1}}}
    scenario = parse({"name": "one", "about": "", "workload": load, "fault": [kill]}, source="test")
    with pytest.raises(ScenarioError, match=f"the {part} is part of .*give workload.return_s"):
        run(scenario, folder=tmp_path / "out")
