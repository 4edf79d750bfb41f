"""Without Ray the adapter and its command say what to install."""

from __future__ import annotations

import sys

import pytest

from holdfast.adapters.ray import launch
from holdfast.elastic import ConfigError
from holdfast.tools.cli import main

REMEDY = "pip install 'holdfast[ray]'"


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)


def test_the_call_names_the_extra() -> None:
    with pytest.raises(ConfigError) as refused:
        launch("train.py", nodes=2)
    assert REMEDY in str(refused.value)


def test_the_command_names_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ray", "submit", "--nodes", "2:8", "train.py"]) == 2
    assert REMEDY in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "two"], "give N or MIN:MAX"),
        (["--resource", "TPU"], "is not a positive number"),
        (["--env", "NAME"], "give NAME=VALUE"),
        (["--run-option=--nproc=3"], "use nproc instead of --nproc"),
        (["--nodes", "3:2"], "nodes=(3, 2)"),
        (["--parity", "-1"], "is not a number of nodes"),
    ],
)
def test_a_wrong_command_line_is_refused_before_ray_is_asked(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["ray", "submit", *words, "train.py"])
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    assert said in capsys.readouterr().err
