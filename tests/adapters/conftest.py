"""Fixtures of the tests that run other libraries: each names the environment that it needs."""

from __future__ import annotations

import pytest
from programs import Run, runner


@pytest.fixture(scope="session")
def bitsandbytes() -> Run:
    """Return a function that runs a program of the environment with bitsandbytes."""
    return runner("bitsandbytes")


@pytest.fixture(scope="session")
def deepspeed() -> Run:
    """Return a function that runs a program of the environment with DeepSpeed."""
    return runner("deepspeed")


@pytest.fixture(scope="session")
def ray_cluster() -> Run:
    """Return a function that runs a program of the environment with Ray and Holdfast."""
    return runner("ray")


@pytest.fixture(scope="session")
def lightning() -> Run:
    """Return a function that runs a program of the environment with Lightning."""
    return runner("lightning")


@pytest.fixture(scope="session")
def torchtitan() -> Run:
    """Return a function that runs a program of the environment with torchtitan."""
    return runner("torchtitan")


@pytest.fixture(scope="session")
def trl() -> Run:
    """Return a function that runs a program of the environment with TRL."""
    return runner("trl")


@pytest.fixture(scope="session")
def trackers() -> Run:
    """Return a function that runs a program of the environment with experiment trackers."""
    return runner("trackers")
