"""Sizes are read and written as people write them."""

from __future__ import annotations

import argparse

import pytest

from holdfast.tools.subcommand import positive
from holdfast.tools.terminal import parse_bytes, readable, shape_text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("2GiB", 2 << 30),
        ("512M", 512 << 20),
        ("512 MiB", 512 << 20),
        ("1.5k", 1536),
        ("1.5GB", 1_500_000_000),
        ("4096", 4096),
        ("7b", 7),
        ("1ti", 1 << 40),
    ],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1x", "0", "0.1", "1 2"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (5 << 50, "5.0 PiB")],
)
def test_sizes_are_written_in_the_unit_that_fits(nbytes: int, text: str) -> None:
    assert readable(nbytes) == text


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", ""])
def test_what_is_no_positive_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
        positive(text)


def test_shapes_are_written_for_people() -> None:
    assert shape_text((2, 3)) == "2 x 3"
    assert shape_text(()) == "scalar"
