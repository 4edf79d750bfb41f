"""The names of preloaded modules, and the commands whose workers can be forked."""

from __future__ import annotations

import re

import pytest

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec, python_command
from holdfast.elastic.preload.program import WorkerProgram, module_names, program_of

PYTHON = "/usr/bin/python3"


def test_names_are_separated_by_commas() -> None:
    assert module_names("torch, transformers.models,,") == ("torch", "transformers.models")
    assert module_names("") == ()


@pytest.mark.parametrize("text", ["torch transformers", "torch;os", "a..b", "1a", "-m"])
def test_what_is_no_name_of_a_module_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--preload has .* as in torch,transformers"):
        module_names(text)


def test_scripts_and_modules_are_recognised() -> None:
    script = program_of((PYTHON, "-u", "train.py", "-m", "x"), interpreter=PYTHON)
    assert script == WorkerProgram(
        name="train.py", is_module=False, args=("-m", "x"), unbuffered=True
    )
    module = program_of((PYTHON, "-u", "-m", "a.b", "--x"), interpreter=PYTHON)
    assert module == WorkerProgram(name="a.b", is_module=True, args=("--x",), unbuffered=True)
    buffered = program_of((PYTHON, "-m", "a.b"), interpreter=PYTHON)
    assert buffered == WorkerProgram(name="a.b", is_module=True, args=())
    assert program_of((PYTHON, "train.py"), interpreter=PYTHON).name == "train.py"


@pytest.mark.parametrize(
    "command",
    [
        ("/bin/sh", "train.sh"),
        ("/usr/bin/python3.9", "-u", "train.py"),
        (PYTHON, "-O", "train.py"),
        (PYTHON, "-u", "-c", "pass"),
        (PYTHON, "-u", "-m"),
        (PYTHON, "-u"),
        (PYTHON,),
        (PYTHON, "-u", "-O", "train.py"),
    ],
)
def test_other_commands_are_refused_by_name(command: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=re.escape(" ".join(command))):
        program_of(command, interpreter=PYTHON)


def test_a_job_with_such_a_command_does_not_start() -> None:
    node = NodeSpec(name="n", slots={"trainer": 1})
    with pytest.raises(ConfigError, match="leave preload out"):
        LaunchConfig(command=("sh",), nodes=(node,), wanted={"trainer": 1}, preload=("json",))
    LaunchConfig(
        command=python_command("-m", ["train"]),
        nodes=(node,),
        wanted={"trainer": 1},
        preload=("json",),
    )
