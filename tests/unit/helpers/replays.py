"""Replays of small seas by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.written_seas import PARAMETERS

from holdfast import ckpt
from holdfast.ckpt.store.local import LocalStore
from holdfast.tools import cli


def replayed(
    store: LocalStore, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, dict[str, Any]]:
    """Run the command; return its exit code and its JSON."""
    code = cli.main(["islands", "replay", "--sea", store.root, "--json", *map(str, words)])
    return code, json.loads(capsys.readouterr().out)


def zeros(root: Path, *, step: int = 0) -> Path:
    """Save the first weights of a small sea below ``root``; return it."""
    ckpt.save(root, {each.name: torch.zeros(each.shape) for each in PARAMETERS}, step=step)
    return root
