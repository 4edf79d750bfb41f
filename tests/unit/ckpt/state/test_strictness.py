"""Differing keys are reported or refused by key; strictness never extends to contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.shards import MemoryShards, capture_world
from torch import nn

from holdfast import ckpt
from holdfast.ckpt.errors import ArgumentError, MismatchError
from holdfast.ckpt.state.flatten import flatten
from holdfast.ckpt.state.local_boxes import TensorShard
from holdfast.ckpt.state.restore import RestoreReport, live_keys, restore
from holdfast.ckpt.state.strictness import LEVELS, Strictness, check_selected, chooser
from holdfast.ckpt.testing.shards import capture


def test_the_first_pattern_that_matches_says_the_level_and_the_rest_is_exact() -> None:
    strict = Strictness.of({"model.head.*": "ignore", "model.*": "ignore-missing", "x?": False})
    assert strict.level("model.head.weight") == "ignore"
    assert strict.level("model.layers.0.weight") == "ignore-missing"
    assert strict.level("x1") == "ignore"
    assert strict.level("optimizer.groups.0.lr") == "exact"
    assert [Strictness.of(s).level("k") for s in (True, False, *LEVELS)] == [
        "exact",
        "ignore",
        *LEVELS,
    ]


@pytest.mark.parametrize(
    ("strict", "message"),
    [
        (
            "ignore-mising",
            r"strict is 'ignore-mising'.*exact, ignore-missing.*mean 'ignore-missing'",
        ),
        ({"a.*": "loose"}, r"strict\['a\.\*'\] is 'loose'; it must be one of exact"),
        (3, "strict is 3"),
        ({3: "ignore"}, "strict has the key 3; give glob patterns"),
    ],
)
def test_an_unknown_level_is_an_error_that_names_the_levels(strict: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Strictness.of(strict)


@pytest.mark.parametrize("select", [3, ["model.*", 3], b"model.*", True])
def test_patterns_that_are_no_texts_are_refused_by_name(select: Any) -> None:
    with pytest.raises(ArgumentError, match=r"select is .*; give a glob pattern"):
        chooser(select)


def test_what_is_accepted_is_told_apart_from_what_is_refused() -> None:
    strict = Strictness.of({"a": "ignore-missing", "b": "ignore-extra"})
    words = {"a": "a!", "b": "b!"}
    verdict = strict.judge(missing=words, extra=words)
    assert verdict.refused == ("b!", "a!")
    assert (verdict.missing, verdict.extra) == (("a",), ("b",))


def test_patterns_select_keys_and_stems() -> None:
    chosen = chooser(["model.layers.3.*", "sched*"])
    assert [k for k in ("model.layers.3.w", "model.layers.30.w", "schedule") if chosen(k)] == [
        "model.layers.3.w",
        "schedule",
    ]
    assert chooser("schedule.*")("schedule")
    assert chooser(None)("anything")
    keys = ["model.layers.0.weight", "model.layers.1.weight", "optimizer.groups.0.lr"]
    check_selected(["model.*", "*.lr"], keys)
    with pytest.raises(
        MismatchError, match=r"'model\.layer\.\*' matches none of the 3 keys.*layers"
    ):
        check_selected(["*.lr", "model.layer.*"], keys)
    with pytest.raises(MismatchError, match=r"near: model, optimizer"):
        check_selected("zzzzzz", keys)


def shards(state: dict[str, Any]) -> MemoryShards:
    return MemoryShards([capture(state, step=3)])


def build(seed: int, *, layers: int = 3, width: int = 2) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "n": seed, "tags": {"seed": seed}}


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in state["model"].state_dict().items()}


def moments(state: dict[str, Any]) -> list[torch.Tensor]:
    return [s["exp_avg"].clone() for s in state["optimizer"].state.values()]


def equal(a: Any, b: Any) -> bool:
    return all(map(torch.equal, a, b))


def test_fewer_and_more_layers_load_at_the_level_that_allows_them() -> None:
    saved, live = shards(build(1, layers=3)), build(2, layers=4)
    before = flat(live)
    for strict in ("exact", "ignore-extra", {"optimizer.*": "ignore"}):
        with pytest.raises(
            MismatchError, match=r"missing: model\.3\.weight float32 \[2, 2\] was not"
        ):
            restore(live, saved, rank=0, strict=strict)
    report = restore(live, saved, rank=0, strict="ignore-missing")
    assert report.missing == (
        "model.3.weight",
        "model.3.bias",
        "optimizer.state.model.3.weight",
        "optimizer.state.model.3.bias",
    )
    assert report.extra == ()
    assert torch.equal(live["model"][3].weight, before["3.weight"])
    assert torch.equal(live["model"][0].weight, build(1)["model"][0].weight)
    live = build(2, layers=2)
    with pytest.raises(MismatchError, match=r"optimizer was saved with parameter model\.2\.bias"):
        restore(live, saved, rank=0, strict={"model.*": "ignore-extra"})
    report = restore(live, saved, rank=0, strict={"*2.*": "ignore-extra"})
    assert set(report.extra) == {
        "model.2.weight",
        "model.2.bias",
        "optimizer.state.model.2.weight",
        "optimizer.state.model.2.bias",
    }
    assert report.missing == ()


@pytest.mark.parametrize("strict", [False, "ignore", {"*": "ignore"}])
def test_another_shape_or_dtype_is_refused_at_every_level(strict: Any) -> None:
    saved = shards({"t": torch.ones(2), "u": torch.ones(2)})
    for wrong in (torch.zeros(3), torch.zeros(1, 2), torch.zeros(2, dtype=torch.float64)):
        live = {"t": wrong, "u": torch.zeros(2)}
        with pytest.raises(MismatchError, match=r"differs: t is float.*never accepted"):
            restore(live, saved, rank=0, strict=strict)
        assert live["u"].sum() == 0


def test_only_what_is_selected_is_touched() -> None:
    source, live = build(1), build(2)
    saved, before, old = shards(source), flat(live), moments(live)
    report = restore(live, saved, rank=0, select=["model.1.*"])
    assert torch.equal(live["model"][1].weight, source["model"][1].weight)
    assert torch.equal(live["model"][0].weight, before["0.weight"])
    assert equal(moments(live), old)
    assert live["optimizer"].param_groups[0]["lr"] == pytest.approx(0.3)
    assert (live["n"], live["tags"]) == (2, {"seed": 2})
    assert (report.missing, report.extra, report.tensors) == ((), (), 2)
    assert {"model.0.weight", "optimizer.groups.0.lr", "n", "tags"} <= set(report.skipped)
    assert not {"model.1.weight", "model.1.bias"} & set(report.skipped)
    restore(live, saved, rank=0, select="n")
    assert (live["n"], live["tags"]) == (1, {"seed": 2})


def test_a_part_of_an_optimizer_can_be_selected() -> None:
    source, live = build(1), build(2)
    saved, old = shards(source), moments(live)
    restore(live, saved, rank=0, select="optimizer.state.model.0.*")
    new, want = moments(live), moments(source)
    assert equal(new[:2], want[:2])
    assert equal(new[2:], old[2:])
    assert live["optimizer"].param_groups[0]["lr"] == pytest.approx(0.3)
    restore(live, saved, rank=0, select="optimizer.groups.*")
    assert live["optimizer"].param_groups[0]["lr"] == pytest.approx(0.2)
    assert equal(moments(live), new)
    first = next(iter(live["optimizer"].state.values()))
    first["exp_avg_sq"].fill_(9)
    restore(live, saved, rank=0, select="optimizer.state.*.exp_avg")
    assert equal(moments(live), want)
    assert (first["exp_avg_sq"] == 9).all()


def test_a_selection_leaves_other_models_alone_and_refuses_what_is_in_it() -> None:
    saved, live = shards(build(1)), build(2, layers=2)
    with pytest.raises(MismatchError, match=r"extra: model\.2\.weight"):
        restore(live, saved, rank=0, select="model.*")
    assert restore(live, saved, rank=0, select="model.*", strict="ignore-extra").extra == (
        "model.2.weight",
        "model.2.bias",
    )
    restore(live, saved, rank=0, select=["model.0.*", "model.1.*"])
    assert torch.equal(live["model"][0].weight, build(1)["model"][0].weight)
    wide = build(2, width=3)
    with pytest.raises(MismatchError, match=r"differs: model\.0\.weight"):
        restore(wide, saved, rank=0, select="model.0.*", strict="ignore")
    with pytest.raises(MismatchError, match=r"select: 'modle\.\*' matches none.*near: model"):
        restore(live, saved, rank=0, select="modle.*")


def test_what_other_ranks_hold_is_not_extra_here() -> None:
    saved = shards(build(1, layers=3))
    live = build(2, layers=1)
    keys = [
        f"{p}model.{i}.{k}"
        for p in ("", "optimizer.state.")
        for i in (1, 2)
        for k in ("weight", "bias")
    ]
    with pytest.raises(MismatchError, match=r"\(8 differences\)"):
        restore(live, saved, rank=0)
    report = restore(live, saved, rank=0, elsewhere=keys)
    assert (report.missing, report.extra) == ((), ())
    only: dict[str, Any] = {"n": 0, "tags": {}}
    fresh = build(0, layers=3)
    fresh["optimizer"].state.clear()  # as at a rank that has not taken a step yet
    everything = live_keys(flatten(fresh))
    assert restore(only, saved, rank=0, elsewhere=everything).extra == ()
    less = [key for key in everything if "model.0.bias" not in key]
    report = restore(only, saved, rank=0, elsewhere=less, strict="ignore-extra")
    assert report.extra == (
        "model.0.bias",
        "optimizer.state.model.0.bias.step",
        "optimizer.state.model.0.bias.exp_avg",
        "optimizer.state.model.0.bias.exp_avg_sq",
    )


def test_a_tensor_stored_twice_loads_into_a_tied_one_only_if_both_are_equal() -> None:
    tied = nn.Linear(2, 2, bias=False)
    live = {"a": tied, "b": tied}
    same = shards({"a": {"weight": torch.ones(2, 2)}, "b": {"weight": torch.ones(2, 2)}})
    restore(live, same, rank=0)
    assert (tied.weight == 1).all()
    other = shards({"a": {"weight": torch.zeros(2, 2)}, "b": {"weight": torch.ones(2, 2)}})
    with pytest.raises(MismatchError, match=r"a\.weight, b\.weight are one tensor here"):
        restore(live, other, rank=0, strict="ignore")
    assert (tied.weight == 1).all()


def test_equal_contents_are_seen_however_they_are_cut() -> None:
    def state(rank: int, value: float) -> dict[str, Any]:
        row = TensorShard(torch.full((1, 2), 3.0), shape=(2, 2), offset=(rank, 0))
        column = TensorShard(torch.full((2, 1), value), shape=(2, 2), offset=(0, rank))
        return {"a": {"weight": row}, "b": {"weight": column}}

    tied = nn.Linear(2, 2, bias=False)
    restore(
        {"a": tied, "b": tied},
        MemoryShards(capture_world([state(rank, 3.0) for rank in range(2)])),
        rank=0,
    )
    assert (tied.weight == 3).all()
    with pytest.raises(MismatchError, match="one tensor here"):
        restore(
            {"a": tied, "b": tied},
            MemoryShards(capture_world([state(rank, 3.0 + rank) for rank in range(2)])),
            rank=0,
        )


def test_load_takes_levels_and_selections(tmp_path: Path) -> None:
    ckpt.save(tmp_path, build(1), step=1)
    live = build(2, layers=2)
    with pytest.raises(ckpt.MismatchError):
        ckpt.load(tmp_path, live)
    report: RestoreReport = ckpt.load(tmp_path, live, strict="ignore-extra")
    assert len(report.extra) == 4
    report = ckpt.load(tmp_path, build(2, layers=2), select="model.0.*")
    assert report.tensors == 2
    with pytest.raises(ckpt.ArgumentError, match="ignore-missing"):
        ckpt.load(tmp_path, live, strict="lenient")
