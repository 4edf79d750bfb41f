"""Every objective, correction and penalty against a plain version, number by number."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, get_args

import hypothesis.strategies as st
import pytest
import torch
from exploring import examples
from hypothesis import assume, given, settings

from holdfast.adapters.rl.loss.batch import TrainingBatch
from holdfast.adapters.rl.loss.divergence import KLConfig, answer_divergences, divergences
from holdfast.adapters.rl.loss.objectives import Objective
from holdfast.adapters.rl.loss.penalties import LengthPenalty
from holdfast.adapters.rl.loss.ppo import LossConfig, Proximal, policy_loss
from holdfast.adapters.rl.loss.ratios import Correction

torch.set_num_threads(1)
QUICK = settings(max_examples=examples(15), deadline=None)
STEP = 5
LOG = st.floats(-3, 0, width=32)
ROW = st.lists(
    st.tuples(LOG, LOG, LOG, LOG, st.integers(2, STEP), st.booleans()), min_size=1, max_size=6
)
ROWS = st.lists(st.tuples(ROW, st.floats(-2, 2, width=32)), min_size=1, max_size=4)
Token = tuple[float, float, float, float, int, bool]
"""Log-probabilities now, of the proximal policy, recorded, of the reference; version; sampled."""

COMBINATIONS = [
    (objective, correction, proximal)
    for objective, correction, proximal in product(
        get_args(Objective), get_args(Correction), ("behavior", "recomputed")
    )
    if not (proximal == "behavior" and correction not in ("token", "none"))
    and not (
        objective == "gspo" and proximal != "behavior" and correction not in ("sequence", "none")
    )
]


def batch_of(rows: list[tuple[list[Token], float]]) -> tuple[TrainingBatch, torch.Tensor]:
    """Return a padded batch, and the other log-probabilities [3, rows, columns]."""
    columns = max(len(row) for row, _ in rows)
    behavior = torch.zeros(len(rows), columns)
    others = torch.full((3, len(rows), columns), -9.0)
    mask, versions = torch.zeros_like(behavior), torch.zeros(len(rows), columns, dtype=torch.long)
    for at, (row, _) in enumerate(rows):
        for place, (now, anchor, recorded, reference, version, is_sampled) in enumerate(row):
            others[:, at, place] = torch.tensor([now, anchor, reference])
            if is_sampled:
                behavior[at, place], mask[at, place] = recorded, 1.0
                versions[at, place] = version
    advantages = torch.tensor([advantage for _, advantage in rows])
    tokens = torch.zeros(len(rows), columns + 1, dtype=torch.long)
    batch = TrainingBatch(
        tokens=tokens,
        behavior=behavior,
        mask=mask,
        versions=versions,
        rewards=torch.zeros(len(rows)),
        advantages=advantages,
        used=torch.ones(len(rows), dtype=torch.bool),
    )
    return batch, others


def plain_weight(logs: list[float], at: int, config: LossConfig) -> float:
    """Return the weight of a token; ``logs`` are proximal minus recorded, of the answer."""
    own = math.exp(logs[at])
    match config.correction:
        case "none":
            return 1.0
        case "icepop":
            return own if config.icepop_low <= own <= config.icepop_high else 0.0
        case "sequence":
            own = math.exp(sum(logs))
        case "prefix":
            own *= min([1.0, *(math.exp(log) for log in logs[:at])])
    return min(own, config.behavior_cap)


def plain(rows: list[tuple[list[Token], float]], config: LossConfig) -> tuple[float, list[float]]:
    """Return the loss and its derivatives by the present log-probabilities of sampled tokens."""
    loss, slopes = 0.0, list[float]()
    answers = [([t for t in row if t[5]], advantage) for row, advantage in rows]
    answers = [each for each in answers if each[0]]
    count = sum(len(answer) for answer, _ in answers)
    for answer, advantage in answers:
        anchors = [t[2] if config.proximal == "behavior" else t[1] for t in answer]
        logs = [anchor - t[2] for anchor, t in zip(anchors, answer, strict=True)]
        ratios = [math.exp(t[0] - anchor) for anchor, t in zip(anchors, answer, strict=True)]
        if config.objective == "gspo":
            ratios = [math.prod(ratios) ** (1 / len(answer))] * len(answer)
        per = 1 / (len(answers) * len(answer)) if config.objective == "gspo" else 1 / count
        pull = 0.0
        for at, (now, _, _, reference, version, _) in enumerate(answer):
            weight = plain_weight(logs, at, config)
            weight *= config.staleness_discount ** (STEP - version)
            clipped = min(max(ratios[at], 1 - config.clip_low), 1 + config.clip_high)
            if config.objective == "cispo":
                term, slope = clipped * advantage * now, clipped * advantage
            else:
                term = min(ratios[at] * advantage, clipped * advantage)
                slope = ratios[at] * advantage if term == ratios[at] * advantage else 0.0
            loss -= per * weight * term
            pull += weight * slope / len(answer)
            slopes.append(-per * weight * slope)
            if config.kl is not None:
                log = reference - now
                loss += per * config.kl.weight * (math.exp(log) - log - 1)
                slopes[-1] += per * config.kl.weight * (1 - math.exp(log))
        if config.objective == "gspo":  # every token moves the one ratio of its answer
            for at in range(len(answer)):
                kl = 0.0
                if config.kl is not None:
                    kl = config.kl.weight * (1 - math.exp(answer[at][3] - answer[at][0]))
                slopes[len(slopes) - len(answer) + at] = per * (kl - pull)
    return loss, slopes


@pytest.mark.parametrize(("objective", "correction", "proximal"), COMBINATIONS)
@QUICK
@given(rows=ROWS, kl=st.booleans(), discount=st.sampled_from([1.0, 0.5]))
def test_the_loss_and_its_gradient_are_the_plain_ones(
    objective: Objective,
    correction: Correction,
    proximal: Proximal,
    rows: list[tuple[list[Token], float]],
    kl: bool,
    discount: float,
) -> None:
    assume(any(token[5] for row, _ in rows for token in row))
    config = LossConfig(
        objective=objective,
        correction=correction,
        proximal=proximal,
        staleness_discount=discount,
        kl=KLConfig(weight=0.3) if kl else None,
    )
    batch, (now, anchor, reference) = batch_of(rows)
    for each in (now, anchor):  # no ratio at an edge, where rounding decides
        ratio = (each - (anchor if each is now else batch.behavior)).exp()
        edges = (1 - config.clip_low, 1 + config.clip_high, config.icepop_low, config.icepop_high)
        assume(all(((ratio - edge).abs() > 1e-3)[batch.mask > 0].all() for edge in edges))
    now.requires_grad_()
    loss = policy_loss(
        now,
        batch,
        config=config,
        step=STEP,
        scale=1 / config.units(batch),
        proximal=None if proximal == "behavior" else anchor,
        reference=reference if kl else None,
    )
    loss.backward()  # type: ignore[no-untyped-call]
    expected, slopes = plain(rows, config)
    assert loss.item() == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert now.grad is not None
    assert not now.grad[batch.mask == 0].any()
    assert now.grad[batch.mask > 0].tolist() == pytest.approx(slopes, rel=2e-3, abs=1e-4)


@QUICK
@given(rows=ROWS)
def test_the_divergence_is_the_plain_one_and_never_below_zero(
    rows: list[tuple[list[Token], float]],
) -> None:
    batch, (_, _, reference) = batch_of(rows)
    found = answer_divergences(reference, batch.behavior, batch.mask)
    assert (divergences(reference, batch.behavior) >= -1e-6).all()
    for (row, _), value in zip(rows, found.tolist(), strict=True):
        logs = [token[3] - token[2] for token in row if token[5]]
        assert value == pytest.approx(sum(math.exp(x) - x - 1 for x in logs), rel=1e-3, abs=1e-5)


@given(weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=6))
def test_the_estimate_has_no_bias_under_the_policy_that_sampled(weights: list[float]) -> None:
    policy = torch.tensor(weights).double()
    policy, reference = policy / policy.sum(), policy.flip(0) / policy.sum()
    expected = (policy * (policy / reference).log()).sum()
    estimate = (policy * divergences(reference.log(), policy.log())).sum()
    torch.testing.assert_close(estimate, expected)


@given(
    most=st.integers(1, 60), window=st.integers(0, 60), price=st.floats(0, 1), top=st.floats(0, 3)
)
def test_the_penalty_of_a_length_is_the_plain_one(
    most: int, window: int, price: float, top: float
) -> None:
    penalty = LengthPenalty(overlong_tokens=window, overlong=top, per_token=price)
    for tokens in range(1, most + 1):
        if not window or tokens <= most - window:
            expected = 0.0
        else:
            expected = min(1.0, (tokens - (most - window)) / window)
        assert penalty.of(tokens, most=most) == pytest.approx(price * tokens + top * expected)


def refused(**changes: Any) -> str:
    with pytest.raises(ValueError, match=r"needed|set ") as caught:
        LossConfig(**changes)
    return str(caught.value)


@pytest.mark.parametrize("objective", ["gspo", "cispo"])
def test_an_objective_whose_clip_could_not_act_is_refused(objective: str) -> None:
    assert "set proximal to 'behavior', 'ewma' or 'recomputed'" in refused(objective=objective)
    for proximal in ("behavior", "ewma", "recomputed"):
        LossConfig(objective=objective, proximal=proximal, correction="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("correction", ["prefix", "sequence", "icepop"])
def test_a_correction_that_could_not_act_is_refused(correction: str) -> None:
    assert "makes both one" in refused(proximal="behavior", correction=correction)


@pytest.mark.parametrize("correction", ["token", "prefix", "icepop"])
def test_one_term_per_answer_takes_no_weights_of_single_tokens(correction: str) -> None:
    said = refused(objective="gspo", proximal="recomputed", correction=correction)
    assert "set correction to 'sequence' or 'none', or proximal to 'behavior'" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"icepop_low": 0.0}, "icepop_low is 0.0"),
        ({"icepop_low": 1.5}, "icepop_low is 1.5"),
        ({"icepop_high": 0.5}, "icepop_high is 0.5"),
        ({"icepop_high": math.nan}, "icepop_high is nan"),
    ],
)
def test_a_band_that_does_not_hold_one_is_refused(changes: dict[str, float], said: str) -> None:
    assert said in refused(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight": 0.0}, "weight is 0.0"),
        ({"weight": math.nan}, "weight is nan"),
        ({"renew_every": 0}, "renew_every is 0"),
        ({"checkpoint": "runs/one"}, "checkpoint and step belong together"),
        ({"step": 4}, "checkpoint and step belong together"),
    ],
)
def test_a_divergence_out_of_range_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        KLConfig(**changes)


@pytest.mark.parametrize("field", ["overlong_tokens", "overlong", "per_token"])
def test_a_penalty_below_zero_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is -1, needed: 0 or more"):
        LengthPenalty(**{field: -1})
    assert LengthPenalty().of(9, most=9) == 0


def test_the_reference_of_a_step_is_the_newest_multiple() -> None:
    assert [KLConfig(renew_every=3).version_at(step) for step in range(7)] == [0, 0, 0, 3, 3, 3, 6]
    assert KLConfig().version_at(99) == 0
    named = [KLConfig(), *(KLConfig(checkpoint=c, step=s) for c in "ab" for s in (0, 1))]
    assert len({each.origin for each in named}) == 5
