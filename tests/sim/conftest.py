"""Options of the simulations."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sim-seed", type=int, default=None, help="replay this seed alone")
    parser.addoption("--sim-runs", type=int, default=None, help="how many seeds to try")
