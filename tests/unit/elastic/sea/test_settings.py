"""The settings of an island: found wrong where they are made, with a remedy that works."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.sea.settings import Islands, Nesterov, Quorum


def test_settings_have_defaults_and_a_stride() -> None:
    islands = Islands(name="oslo", meet="s3://bucket/sea")
    assert (islands.stride, islands.wait, islands.outer) == (10, "all", Nesterov(0.7, 0.5))
    assert Islands().name == ""
    assert Islands(every=5, portions=1, overlap=4, wait=Quorum(0.8, grace_s=5)).stride == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "a/b"}, "begin with a letter or digit"),
        ({"name": ".."}, "begin with a letter or digit"),
        ({"name": "x" * 64}, "up to 63 letters"),
        ({"meet": 3}, "give a directory, s3://"),
        ({"every": 0}, "give 1 or more steps"),
        ({"portions": 0}, "give 1 or more"),
        ({"every": 41}, "give a multiple of 4 steps"),
        ({"overlap": 0}, "a merge takes time"),
        ({"overlap": 10}, "next tide begins after 10 steps"),
        ({"bits": 5}, "give 4, 8, 16 or 32"),
        ({"bits": True}, "give 4, 8, 16 or 32"),
        ({"outer": 0.7}, "outer=holdfast.Nesterov"),
        ({"wait": "some"}, "give 'all' or holdfast.Quorum"),
        ({"wait": 0.8}, "give 'all' or holdfast.Quorum"),
        ({"patience_s": 0}, "above 0"),
        ({"founders": 0}, "give 1 or more"),
        ({"age_limit": -1}, "give 0 or more merges"),
        ({"least_every": 0}, "give 1 or more steps, or None"),
        ({"least_every": 42, "every": 80}, "give a multiple of 4, at most 80"),
        ({"least_every": 44}, "give a multiple of 4, at most 40"),
        ({"least_every": 20}, "begins after 5 steps, and overlap is 5"),
        ({"uplink": 2.5}, "give a rate, as in '20Mbit/s'"),
        ({"uplink": "fast"}, "is not a rate"),
        ({"downlink": 0}, "give a rate, as in '20Mbit/s'"),
        ({"downlink": "0.1Mbit/s"}, "give 0.25Mbit/s or more"),
        ({"key": 3}, "give the path of a key file"),
        ({"address": "tcp://oslo:4711"}, "give HOST, HOST:PORT or :PORT"),
        ({"address": "oslo:65536"}, "give HOST, HOST:PORT or :PORT"),
        ({"address": "::1"}, "give HOST, HOST:PORT or :PORT"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        Islands(**wrong)
    assert next(iter(wrong)) in str(found.value)


def test_a_line_is_declared_in_bits_or_bytes() -> None:
    assert Islands(uplink="20Mbit/s", downlink="2.5MB/s").bytes_per_s == (2_500_000, 2_500_000)
    assert Islands(uplink=40_000).bytes_per_s == (40_000, 0)


@pytest.mark.parametrize(
    ("address", "place"),
    [("", ("", 0)), ("oslo", ("oslo", 0)), ("10.0.0.3:47", ("10.0.0.3", 47)), (":47", ("", 47))],
)
def test_an_address_may_leave_the_host_or_the_port_open(
    address: str, place: tuple[str, int]
) -> None:
    assert Islands(address=address).place == place


@pytest.mark.parametrize("wrong", [{"lr": 0}, {"lr": float("nan")}, {"momentum": 1}])
def test_a_wrong_outer_step_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"Nesterov\("):
        Nesterov(**wrong)


@pytest.mark.parametrize(("share", "grace_s"), [(0, 1), (1.5, 1), (0.5, -1)])
def test_a_wrong_quorum_is_refused(share: float, grace_s: float) -> None:
    with pytest.raises(ConfigError, match=r"Quorum\("):
        Quorum(share, grace_s=grace_s)
