"""The line of the user's script, seen through torch and Holdfast."""

from __future__ import annotations

import sys

import torch
from torch import nn

from holdfast.elastic.loop import user_code


class Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.line = user_code.user_line()
        return x


def test_the_line_is_that_of_the_innermost_code_of_the_user() -> None:
    asks = Asks()
    asks(torch.zeros(1))
    assert asks.line == f"test_user_code.py:{Asks.forward.__code__.co_firstlineno + 1}"


def test_torch_python_and_holdfast_are_not_the_user() -> None:
    for file in (torch.__file__, nn.__file__, user_code.__file__, "<string>"):
        assert not user_code.is_users(file)
    assert not user_code.is_users(str(sys.modules["argparse"].__file__))
    assert user_code.is_users(__file__)


def test_without_a_line_of_the_user_it_is_the_script() -> None:
    assert user_code.line_of(None) == "the script"
