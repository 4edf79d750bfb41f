"""A loop's own collectives are refused inside microbatches; values are collected between passes."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from disturbed import alone_and_disturbed
from own_calls_bodies import CALLS, MICROBATCHES, OF_ALL_RANKS, everything, same_script
from ranks import ranks
from tree import HELPERS

Found = dict[str, Any]


def ran(world_size: int, folder: Path) -> list[Found]:
    with ranks(world_size, everything, folder) as running:
        found: list[Found] = running.results()
        return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return ran(1, tmp_path_factory.mktemp("alone"))[0]


def test_a_collective_over_data_ranks_is_refused_by_name_and_line(alone: Found) -> None:
    for name, said in alone["refusals"].items():
        call = name.partition(" (")[0]
        assert said.startswith(f"{call} at own_calls_bodies.py:"), (name, said)
        assert "inside microbatch 0: " in said, (name, said)
        if not call.startswith("run."):
            assert "run.gather(values)" in said and "run.reduce" in said
    assert set(alone["refusals"]) == set(CALLS)


def test_a_module_that_averages_by_itself_is_refused_with_the_remedy(alone: Found) -> None:
    said = alone["averaged_by_itself"]
    assert said.startswith("allreduce in the backward at own_calls_bodies.py:")
    assert "give run.track the wrapper, as in run.track(model=ddp)" in said


def test_gathered_values_keep_their_bits_in_the_order_of_microbatches(alone: Found) -> None:
    found = alone["collected"]
    assert found["shapes"] == {
        "float32": [MICROBATCHES, 16],
        "bfloat16": [MICROBATCHES, 2, 3],
        "int8": [MICROBATCHES, 3],
        "bool": [MICROBATCHES],
        "complex64": [MICROBATCHES, 2, 6],
        "negative zero": [MICROBATCHES],
    }
    assert found["bits"]["negative zero"] == [0, 0, 0, 128] * MICROBATCHES
    assert found["bits"]["int8"] == [254] * 3 + [255] * 3 + [0] * 3 + [1] * 3 + [2] * 3
    assert found["reduced"]["tokens"] == MICROBATCHES * 10**17 + 10


def test_a_wrong_value_is_refused_with_the_remedy(alone: Found) -> None:
    found = alone["collected"]
    assert "4 values for the 5 microbatches" in found["too few"]
    wrong = found["wrong"]
    assert "'sum', 'mean', 'max', 'min'" in wrong["a word"]
    assert "torch.int8 has no mean" in wrong["integers"]
    assert "a value is 'a'" in wrong["texts"]
    assert "microbatch 0 is torch.float32 [1], that of 1 is torch.float32 [2]" in wrong["shapes"]


def test_a_microbatch_without_samples_is_told_or_filled(alone: Found) -> None:
    found = alone["at_the_end_of_a_stream"]
    assert "have no samples" in found["said"] and "fill=0.0" in found["said"]
    last = found["rows"][-1]
    assert -1 in last and found["sums"][-1] == sum(value for value in last if value >= 0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_find_at_any_world_size_what_one_finds(
    tmp_path: Path, alone: Found, world_size: int
) -> None:
    by_rank = ran(world_size, tmp_path)
    numbers = [found["collected"].pop("numbers") for found in by_rank]
    assert sorted(chain(*numbers)) == list(range(MICROBATCHES))
    assert len({len(mine) for mine in numbers}) == 2, "uneven shares"
    for found in by_rank:
        assert "values for the" in found["collected"].pop("too few")
        for name, said in found["refusals"].items():
            assert said.partition(" inside")[0] == alone["refusals"][name].partition(" inside")[0]
    expected = {k: v for k, v in alone["collected"].items() if k not in ("numbers", "too few")}
    for found in by_rank:
        assert found["collected"] == expected
        for body in ("contrastive", "at_the_end_of_a_stream", "drawn"):
            assert found[body] == alone[body], body


def test_where_an_axis_of_the_model_spans_the_world_the_default_group_is_refused_alike(
    tmp_path: Path,
) -> None:
    with ranks(2, same_script, tmp_path, with_world=False) as running:
        by_rank = running.results()
    for found in by_rank:
        model, data = found["dp 1 × tp 2"], found["dp 2"]
        assert model["sums"] == [3.0] * MICROBATCHES, "along tp"
        assert set(data["sums"]) == {1.0}
        for name in OF_ALL_RANKS:
            assert data["refused"][name].startswith(f"{name} at own_calls_bodies.py:")
            first = re.sub("inside microbatch [0-9]+", "inside microbatch 0", data["refused"][name])
            assert model["refused"][name] == first, "word for word"


def test_a_contrastive_job_that_loses_a_rank_ends_with_the_weights_of_one_alone(
    tmp_path: Path,
) -> None:
    alone, found = alone_and_disturbed(HELPERS / "contrastive_training.py", tmp_path, ranks=3)
    assert found == alone
