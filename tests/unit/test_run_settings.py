"""The options of ``holdfast run`` that override what the script asks for."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from elastic.errors import ConfigError
from tools import run


def settings(tmp_path: Path, *words: str) -> dict[str, object]:
    script = tmp_path / "train.py"
    script.touch()
    parser = argparse.ArgumentParser()
    run.add_parser(parser.add_subparsers())
    return dict(run._config(parser.parse_args(["run", *words, str(script)])).settings)


def test_only_what_is_given_overrides_the_script(tmp_path: Path) -> None:
    assert settings(tmp_path) == {}
    assert settings(tmp_path, "--parity", "replicate") == {"parity": "replicate"}
    words = ("--parity", "2", "--parity-group", "6", "--memory", "12GiB")
    assert settings(tmp_path, *words) == {"parity": 2, "parity_group": 6, "memory": "12GiB"}


def test_a_wrong_option_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="memory='much': 'much' is not a size"):
        settings(tmp_path, "--memory", "much")
    with pytest.raises(ConfigError, match="give parity_group=5 or more"):
        settings(tmp_path, "--parity", "4", "--parity-group", "4")
