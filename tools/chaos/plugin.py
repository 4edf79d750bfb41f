"""The pytest plug-in: fixtures that run a training job, strike it, and judge its history.

Every pytest loads this module if Holdfast is installed, so it imports nothing but pytest; the
fixtures' needs are imported when a test uses one. ``-p no:holdfast`` disables it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from holdfast.tools.chaos.fixtures.cluster import Cluster
    from holdfast.tools.chaos.fixtures.judging import JobHistory
    from holdfast.tools.chaos.fixtures.nemesis import Nemesis

_FAILURE = pytest.StashKey[str]()

_MARKER = (
    "chaos(seed=0, nodes=2, trainers=1, parity=None, spares=0, domains={}, kinds=(), "
    "deadline_s=120): the nodes of the `cluster` fixture (their number, or name → role → "
    "workers), the seed of `nemesis`, and the kinds of faults to prepare before the job starts"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare ``--chaos-seed``."""
    parser.getgroup("holdfast").addoption(
        "--chaos-seed",
        type=int,
        default=None,
        metavar="N",
        help="seed of every nemesis; it overrides the seed of a test's `chaos` marker",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the failure of a test, for the result of its cluster."""
    report = yield
    if report.failed and call.excinfo is not None:
        item.stash[_FAILURE] = call.excinfo.exconly().partition("\n")[0]
    return report


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """Yield nodes on this machine with agents and sidecars; nothing of them outlives the test."""
    from holdfast.tools.chaos.fixtures.cluster import Cluster
    from holdfast.tools.chaos.fixtures.options import options_of

    marker = request.node.get_closest_marker("chaos")
    seed = request.config.getoption("--chaos-seed")
    options = options_of(marker.args if marker else (), marker.kwargs if marker else {}, seed=seed)
    made = Cluster(tmp_path / "cluster", options, test=request.node.nodeid)
    try:
        yield made
    finally:
        made.close(failure=request.node.stash.get(_FAILURE, ""))


@pytest.fixture
def nemesis(cluster: Cluster) -> Nemesis:
    """Return the nemesis of ``cluster``, which strikes its job."""
    return cluster.nemesis


@pytest.fixture
def history(cluster: Cluster) -> JobHistory:
    """Return the record of the job of ``cluster`` once it has ended: steps, samples, verdict."""
    from holdfast.tools.chaos.fixtures.judging import JobHistory

    return JobHistory(cluster)
