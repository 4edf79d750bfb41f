"""The boxes of each writer under a mesh and rules."""

from __future__ import annotations

import pytest

from holdfast.ckpt.convert.target_layout import SplitRule, TargetLayout
from holdfast.ckpt.errors import MismatchError
from holdfast.ckpt.geometry.layout import Box, TensorSpec


def spec(*shape: int, fqn: str = "w", dtype: str = "float32") -> TensorSpec:
    return TensorSpec(fqn=fqn, dtype=dtype, shape=shape)


def boxes(layout: TargetLayout, *shape: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(box.offset, box.shape) for box in layout.boxes(spec(*shape))]


def test_dp_splits_the_first_dim_as_fsdp2_does() -> None:
    layout = TargetLayout(mesh={"dp": 3})
    assert boxes(layout, 4, 2) == [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((4, 0), (0, 2))]
    assert boxes(layout) == [((), ())] * 3


def test_a_rule_has_another_axis_split_a_dim() -> None:
    layout = TargetLayout(mesh={"dp": 2, "tp": 2}, rules=(SplitRule(glob="w*", axis="tp", dim=-1),))
    assert boxes(layout, 4, 6) == [
        ((0, 0), (2, 3)),
        ((0, 3), (2, 3)),
        ((2, 0), (2, 3)),
        ((2, 3), (2, 3)),
    ]
    assert layout.boxes(spec(4, fqn="b"))[0] == layout.boxes(spec(4, fqn="b"))[1]


def test_axes_that_split_one_dim_nest_as_fsdp2_over_tensor_parallelism() -> None:
    layout = TargetLayout(mesh={"dp": 2, "tp": 2}, rules=(SplitRule(glob="w", axis="tp", dim=0),))
    assert boxes(layout, 8) == [((0,), (2,)), ((4,), (2,)), ((2,), (2,)), ((6,), (2,))]
    assert boxes(layout, 5) == [((0,), (2,)), ((3,), (1,)), ((2,), (1,)), ((4,), (1,))]


def test_the_last_fitting_rule_counts() -> None:
    rules = (SplitRule(glob="*", axis="dp", dim=1), SplitRule(glob="w", axis="dp", dim=0))
    layout = TargetLayout(mesh={"dp": 2}, rules=rules)
    assert boxes(layout, 2, 2)[0] == ((0, 0), (1, 2))
    assert layout.boxes(spec(2, 2, fqn="b"))[0] == Box(offset=(0, 0), shape=(2, 1))


def test_replicas_are_written_once_and_the_bytes_balance() -> None:
    layout = TargetLayout(mesh={"dp": 1, "tp": 2})
    specs = {f"w{n}": spec(8, 8, fqn=f"w{n}") for n in range(6)}
    writers = layout.writers(specs)
    sizes = [sum(c.nbytes for entry in w.values() for c in entry.chunks) for w in writers]
    assert sizes == [6 * 128, 6 * 128]


def test_every_tensor_is_listed_even_an_empty_one() -> None:
    writers = TargetLayout(mesh={"dp": 2}).writers({"w": spec(0, 3)})
    assert writers[0]["w"].chunks == ()
    assert writers[1] == {}


def test_chunks_fit_in_memory_where_the_shape_divides_badly() -> None:
    layout = TargetLayout(mesh={"dp": 2})
    writers = layout.writers({"w": spec(2 * 1009, 1000)}, most_bytes=100_000)
    chunks = [chunk for writer in writers for chunk in writer["w"].chunks]
    assert max(chunk.nbytes for chunk in chunks) <= 100_000
    assert sum(chunk.nbytes for chunk in chunks) == 2 * 1009 * 1000 * 4
    even = layout.writers({"w": spec(2048, 1000)}, most_bytes=100_000)
    assert even[0]["w"].grid == (16, 1000)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (SplitRule(glob="nope", axis="tp", dim=0), "no tensor is called nope"),
        (SplitRule(glob="w", axis="tp", dim=2), "has no dim 2"),
        (SplitRule(glob="w", axis="tp", dim=-3), "has no dim -3"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(rule: SplitRule, said: str) -> None:
    layout = TargetLayout(mesh={"dp": 1, "tp": 2}, rules=(rule,))
    with pytest.raises(MismatchError, match=said):
        layout.writers({"w": spec(4, 4)})


def test_a_mesh_without_the_axis_of_a_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="rule for axis tp"):
        TargetLayout(mesh={"dp": 2}, rules=(SplitRule(glob="w", axis="tp", dim=0),))
    with pytest.raises(ValueError, match="size 0"):
        TargetLayout(mesh={"dp": 0})
