"""Values that a restore cannot bring back are refused, with code that can."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.ckpt.state.trees.per_rank import PerRank
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.tracked.accepted import check_tracked


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, r"best=0\.0\): .* holds a float"),
        (3, "best=3.* an? int"),
        ("a" * 90, "best='aaa.*…"),
        (None, "holds None.*leave it out, if it is always None"),
        ((1, 2), "holds a tuple"),
        (np.float32(1), "holds a float32"),
        (MappingProxyType({"a": 1}), "holds a mappingproxy"),
    ],
)
def test_a_value_of_a_variable_is_refused_with_a_dict_as_the_remedy(value: Any, shown: str) -> None:
    with pytest.raises(ConfigError, match=shown) as caught:
        check_tracked({"model": nn.Linear(1, 1), "best": value})
    assert 'progress["best"]' in str(caught.value)


def test_the_remedy_for_a_number_is_code_that_works() -> None:
    with pytest.raises(ConfigError) as caught:
        check_tracked({"best": 0.5})
    assert 'progress={"best": 0.5}' in str(caught.value)
    check_tracked({"progress": {"best": 0.5}})


def test_a_number_of_one_rank_is_refused_likewise() -> None:
    with pytest.raises(ConfigError, match=r'progress=PerRank\(\{"seen": 1\}\)'):
        check_tracked({"seen": PerRank(1)})
    check_tracked({"seen": PerRank({"seen": 1}), "rng": PerRank(torch.Generator())})


def test_a_number_in_a_tuple_that_is_restored_item_by_item_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nets\.0\.1 \(3\) is in a tuple"):
        check_tracked({"nets": [(torch.ones(1), 3)]})
    check_tracked({"nets": [(torch.ones(1), np.ones(1)), 3], "sizes": [(1, 2)]})


def test_what_can_be_restored_in_place_is_accepted() -> None:
    model = nn.Linear(1, 1)
    check_tracked(
        {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters()),
            "ema": torch.ones(1),
            "array": np.ones(2),
            "seen": [],
            "progress": {"best": 0.0, "name": "a", "acc": np.float64(0.5)},
            "mixed": {"t": torch.ones(1), "n": 3},
            "rng": np.random.default_rng(0),
        }
    )
