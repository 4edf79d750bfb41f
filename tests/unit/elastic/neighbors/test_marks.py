"""The mark that a state keeps of stages that were set from others."""

from __future__ import annotations

from holdfast.ckpt.state import plain
from holdfast.elastic.neighbors.marks import CURSOR, ApproximateMark, in_words, marks_of

MARK = ApproximateMark(step=12, generation=3, stages={"10": (9, 11), "2": (1,)})
WORDS = "approximate since step 12: stage 2 from stage 1, stage 10 from stages 9 and 11"


def test_a_mark_says_since_when_and_from_what() -> None:
    assert MARK.text == WORDS
    assert in_words([MARK, MARK]) == f"{WORDS}; {WORDS}"
    assert in_words([]) == ""


def test_a_mark_is_found_among_the_values_of_a_checkpoint() -> None:
    stored = plain.encode({"step": 20, "approximate": [MARK.plain()]}, CURSOR)
    assert marks_of({CURSOR: stored}) == (MARK,)
    assert marks_of({CURSOR: {"approximate": [MARK.plain()]}}) == (MARK,)


def test_values_without_marks_have_none() -> None:
    for values in ({}, {CURSOR: {}}, {CURSOR: 3}, {CURSOR: {"approximate": [1]}}):
        assert marks_of(values) == ()
    assert marks_of({CURSOR: {"approximate": 7}}) == ()
