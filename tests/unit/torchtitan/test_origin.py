"""The checkpoint from which a run of torchtitan goes on, and the reasons why it cannot."""

from __future__ import annotations

import pytest

from holdfast.adapters.torchtitan.origin import (
    StepsThere,
    StoredState,
    WantedState,
    objection,
    resumed,
)

STORED = StoredState(
    dtypes={"w": "float32", "optimizer.state.w.exp_avg": "float32"},
    values=("optimizer.param_groups.w.lr", "train_state.step", "dataloader.dp_rank_0", "note"),
    dp_degree=2,
)
WANTED = WantedState(
    dtypes={"w": "float32"}, keys=("train_state", "optimizer", "dataloader", "note"), dp_degree=2
)


@pytest.mark.parametrize(
    ("there", "wanted", "chosen"),
    [
        (StepsThere(), None, None),
        (StepsThere(), 3, None),
        (StepsThere(ours=(1, 2), trusted=2), None, ("holdfast", 2)),
        (StepsThere(ours=(1, 2), trusted=1), None, ("holdfast", 1)),
        (StepsThere(ours=(1, 2), trusted=2), 1, ("holdfast", 1)),
        (StepsThere(ours=(1, 2), theirs=(3,), trusted=2), None, ("dcp", 3)),
        (StepsThere(ours=(1, 3), theirs=(3,), trusted=3), None, ("holdfast", 3)),
        (StepsThere(ours=(1, 3), theirs=(2,), trusted=3), 2, ("dcp", 2)),
        (StepsThere(theirs=(0,)), None, ("dcp", 0)),
        (StepsThere(ours=(0,), trusted=0), None, ("holdfast", 0)),
    ],
)
def test_a_run_goes_on_from_the_step_named_or_the_newest_of_both_formats(
    there: StepsThere, wanted: int | None, chosen: tuple[str, int] | None
) -> None:
    assert resumed(there, wanted) == chosen


def test_a_message_lists_the_newest_twenty_steps() -> None:
    assert StepsThere(ours=(3, 1), theirs=(2,)).listed() == "1, 2, 3"
    many = StepsThere(ours=tuple(range(30))).listed()
    assert many.startswith("… 10, 11") and many.endswith("28, 29")


def said(stored: StoredState, wanted: WantedState, others: tuple[int, ...] = ()) -> str:
    return objection(stored, wanted, step=9, others=others, path="runs/x") or ""


def test_a_checkpoint_of_the_same_run_fits() -> None:
    assert said(STORED, WANTED) == ""


def test_a_step_with_the_model_only_names_the_earlier_ones() -> None:
    bare = StoredState(dtypes={"w": "float32"}, values=())
    assert "step 9 has the model only" in said(bare, WANTED)
    assert "no other step is there" in said(bare, WANTED)
    assert "with one of 4, 6" in said(bare, WANTED, others=(4, 6))
    assert "--checkpoint.initial_load_path runs/x" in said(bare, WANTED)


def test_names_that_only_begin_alike_are_other_state() -> None:
    near = StoredState(dtypes={"w": "float32", "optimizers.w": "float32"}, values=("note",))
    assert "--checkpoint.exclude_from_loading train_state,optimizer,dataloader" in said(
        near, WANTED
    )


def test_other_places_in_the_data_count_where_they_are_loaded_only() -> None:
    more = WantedState(dtypes=WANTED.dtypes, keys=WANTED.keys, dp_degree=3)
    assert "the places of 2 data-parallel ranks in the data, this run has 3" in said(STORED, more)
    without = WantedState(dtypes=WANTED.dtypes, keys=("train_state", "optimizer"), dp_degree=3)
    assert said(STORED, without) == ""
    unknown = WantedState(dtypes=WANTED.dtypes, keys=WANTED.keys)
    assert said(STORED, unknown) == ""


def test_another_dtype_is_named_with_the_setting() -> None:
    half = WantedState(dtypes={"w": "bfloat16"}, keys=WANTED.keys, dp_degree=2)
    assert "w of step 9 is float32, this run has bfloat16: set --training.dtype float32" in said(
        STORED, half
    )
