"""A job on Ray asks only clusters that answer."""

from __future__ import annotations

import socket

import pytest

from holdfast.adapters.ray.launching import check_answers
from holdfast.elastic.errors import ConfigError


def test_an_address_at_which_nobody_answers_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"no Ray cluster answers at {address}"):
            check_answers(address)


def test_an_address_that_answers_and_those_that_ray_finds_by_itself_are_left_to_ray() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_answers(f"127.0.0.1:{server.getsockname()[1]}")
    for address in ("", "auto", "local"):
        check_answers(address)
