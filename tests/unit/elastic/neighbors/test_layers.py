"""The counterparts of tensors in neighbouring stages."""

from __future__ import annotations

from holdfast.elastic.neighbors.layers import StageTensor, map_stages


def tensor(fqn: str, stage: int, *shape: int) -> StageTensor:
    return StageTensor(fqn, stage, "float32", shape or (4, 4))


def test_layers_are_matched_by_their_place_in_the_stage() -> None:
    tensors = [tensor(f"model.layers.{n}.w", n // 2) for n in range(6)]
    found = map_stages(tensors, count=3)
    assert found.sources["model.layers.2.w"] == ("model.layers.0.w", "model.layers.4.w")
    assert found.sources["model.layers.3.w"] == ("model.layers.1.w", "model.layers.5.w")
    assert found.sources["model.layers.5.w"] == ("model.layers.3.w",), "the last has one neighbour"
    assert found.replaceable == (0, 1, 2)
    assert found.objection() == ""


def test_only_the_first_number_of_a_name_is_the_layers() -> None:
    tensors = [tensor(f"blocks.{n}.mlp.{k}.w", n, 4, k + 1) for n in range(3) for k in range(2)]
    found = map_stages(tensors, count=3)
    assert found.sources["blocks.1.mlp.1.w"] == ("blocks.0.mlp.1.w", "blocks.2.mlp.1.w")


def test_what_only_an_outer_stage_has_keeps_that_stage_from_being_set_and_no_other() -> None:
    tensors = [tensor(f"layers.{n}.w", n) for n in range(3)]
    found = map_stages([*tensors, tensor("embed.w", 0), tensor("head.w", 2)], count=3)
    assert found.replaceable == (1,)
    assert found.objection() == ""
    assert found.why(0) == "stage 0: embed.w (no number of a layer in its name)"


def test_an_inner_stage_that_nothing_is_like_is_an_objection_with_the_names() -> None:
    tensors = [tensor(f"layers.{n}.w", n) for n in (0, 2)]
    wide = map_stages([*tensors, tensor("layers.1.w", 1, 8, 8)], count=3)
    assert wide.objection() == (
        "stage 1: layers.1.w (float32 [8, 8], layers.0.w of stage 0 is float32 [4, 4])"
    )
    more = map_stages(
        [*tensors, *(tensor(f"layers.1.{name}", 1) for name in ("w", "a", "b", "c", "d", "e"))],
        count=3,
    )
    assert "layers.1.a (no counterpart in stage 0)" in more.objection()
    assert more.objection().endswith(", and 1 more")


def test_a_pipeline_of_one_stage_has_no_neighbours() -> None:
    found = map_stages([tensor("layers.0.w", 0)], count=1)
    assert found.replaceable == ()
    assert found.neighbors(0) == ()


def test_two_unlike_stages_can_not_be_set_at_all() -> None:
    found = map_stages([tensor("layers.0.w", 0), tensor("layers.1.v", 1)], count=2)
    assert found.objection().startswith("stage 0: layers.0.w (no counterpart in stage 1); stage 1")
