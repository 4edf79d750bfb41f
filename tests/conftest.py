"""Settings, fixtures and the order of all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from fork_servers import put_aside
from hypothesis import HealthCheck, settings
from ordering import rank

# A suite started in the background inherits an ignored SIGINT, and so would every process it
# starts; the tests that press Ctrl-C need the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing on a machine that does other things too.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("patient"), derandomize=True)
settings.register_profile("explore", settings.get_profile("patient"), max_examples=1000)
settings.load_profile("patient")

_SHOWN_CHARS = 20_000

pytest_plugins = ["service_fixtures", "object_places", "own_servers", "etcd_fixtures"]


def pytest_configure(config: pytest.Config) -> None:
    """Have files begin in the order below, not in that of their numbers of tests."""
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist is there
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let long files begin first."""
    items.sort(key=lambda item: rank(item.path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the last of what a test wrote in a try that another one followed."""
    for report in terminalreporter.stats.get("rerun", ()):
        for title, text in report.sections:
            terminalreporter.section(f"{report.nodeid}: {title}")
            terminalreporter.write_line(text[-_SHOWN_CHARS:])


@pytest.fixture(autouse=True, scope="module")
def _own_fork_server() -> Iterator[None]:
    """Leave no fork server of multiprocessing to the next module, which has other imports."""
    yield
    put_aside()
