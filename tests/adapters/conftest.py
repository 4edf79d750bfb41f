"""Fixtures of the tests that run other libraries: each names the environment that it needs."""

from __future__ import annotations

import pytest
from programs import Run, runner


@pytest.fixture(scope="session")
def deepspeed() -> Run:
    """Return a function that runs a program of the environment with DeepSpeed."""
    return runner("deepspeed")


@pytest.fixture(scope="session")
def ray_cluster() -> Run:
    """Return a function that runs a program of the environment with Ray and Holdfast."""
    return runner("ray")
