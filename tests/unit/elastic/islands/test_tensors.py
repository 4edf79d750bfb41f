"""The sea's weights of one rank: own progress is sent, merged once, and kept where it is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.ckpt.snapshot.touched import Rows, row_numbers
from holdfast.elastic.errors import ConfigError, NotFiniteError
from holdfast.elastic.islands import tensors as tensors_module
from holdfast.elastic.islands.tensors import Merge, SeaTensors
from holdfast.elastic.sea.settings import Islands, Nesterov

ISLANDS = Islands(name="a", every=4, portions=2, overlap=1, bits=32, outer=Nesterov(1.0, 0.0))


class OneRank:
    """A world of one rank."""

    rank, size = 0, 1

    def gather(self, value: object) -> list[object]:
        return [value]

    def sum_(self, tensor: torch.Tensor) -> None: ...

    def broadcast(self, tensor: torch.Tensor) -> None: ...


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 7), nn.LayerNorm(7))


def _tensors(model: nn.Module, islands: Islands = ISLANDS) -> SeaTensors:
    found = SeaTensors({"model": model}, OneRank(), islands)
    found.begin()
    return found


def _moved(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def test_merged_progress_of_all_islands_is_in_the_weights_once() -> None:
    models = [_model(), _model()]
    seas = [_tensors(model) for model in models]
    for model, by in zip(models, (0.25, 0.75), strict=True):
        _moved(model, by)
    for portion in range(2):
        data = [tensors.encode(portion) for tensors in seas]
        for number, tensors in enumerate(seas):
            merge = Merge(portion=portion, weights=(1, 1), whole=2, own=number)
            tensors.adopt(merge, data)
    expected = [parameter + 0.5 for parameter in _model().parameters()]
    for model in models:
        torch.testing.assert_close(list(model.parameters()), expected)
    assert seas[0].digests(range(2)) == seas[1].digests(range(2))
    assert seas[0].digest_of_weights() == seas[1].digest_of_weights()


def test_progress_that_is_not_in_a_merge_stays_and_is_sent_again() -> None:
    model, other = _model(), _model()
    tensors, theirs = _tensors(model), _tensors(other)
    _moved(model, 0.25)
    _moved(other, 0.5)
    first = tensors.encode(0)
    tensors.adopt(Merge(portion=0, weights=(1,), whole=1, own=-1), [theirs.encode(0)])
    parameters = [dict(m.named_parameters())["0.weight"] for m in (model, _model())]
    torch.testing.assert_close(parameters[0], parameters[1] + 0.75)
    again = tensors.encode(0)
    tensors.adopt(Merge(portion=0, weights=(1,), whole=1, own=0), [again])
    torch.testing.assert_close(tensors.weights["model.0.weight"], parameters[1] + 0.75)
    assert len(first) == len(again) == tensors.nbytes(0)


def test_portions_are_whole_parameters_and_their_payloads_lie_apart() -> None:
    model = _model()
    tensors = _tensors(model)
    assert [each.name for each in tensors.parameters] == [
        f"model.{n}" for n, _ in model.named_parameters()
    ]
    _moved(model, 1.0)
    payloads = [tensors.encode(portion) for portion in range(2)]
    assert [tensors.payload_of(n).numpy().tobytes() for n in range(2)] == payloads
    assert tensors.payload.numel() == sum(map(len, payloads))


def test_at_the_end_the_weights_of_the_sea_are_the_parameters() -> None:
    model = _model()
    tensors = _tensors(model)
    _moved(model, 1.0)
    tensors.take_weights()
    torch.testing.assert_close(list(model.parameters()), list(_model().parameters()))


def test_progress_that_is_not_finite_is_refused_with_its_parameter() -> None:
    model = _model()
    tensors = _tensors(model)
    _moved(model, float("inf"))
    with pytest.raises(NotFiniteError, match=r"model\.0\.weight: progress of inf"):
        tensors.encode(0)


def test_a_parameter_that_several_modules_share_is_merged_once() -> None:
    first = nn.Linear(4, 4)
    second = nn.Sequential(nn.Linear(4, 4), first)
    tensors = SeaTensors({"one": first, "two": second}, OneRank(), ISLANDS)
    names = ["one.weight", "one.bias", "two.0.weight", "two.0.bias"]
    assert [each.name for each in tensors.parameters] == names


def test_what_islands_cannot_merge_is_refused_by_name() -> None:
    for model, words in (
        (nn.Linear(3, 3).double(), "weight is float64: islands merge float32"),
        (nn.Linear(3, 3, bias=False), "1 trainable parameters"),
        (nn.ReLU(), "nothing to merge"),
    ):
        with pytest.raises(ConfigError, match=words):
            SeaTensors({"model": model}, OneRank(), ISLANDS)


def test_only_what_a_merge_or_a_payload_changed_is_named_for_the_next_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensors_module, "LEAST_BYTES", 1)
    monkeypatch.setattr(tensors_module, "LEAST_ROW_BYTES", 1)
    model = _model()
    tensors = _tensors(model)
    names = {
        each.data_ptr(): f"{kind}.{name}"
        for kind, leaves in (("weights", tensors.weights), ("momentum", tensors.momentum))
        for name, each in leaves.items()
        if isinstance(each, torch.Tensor)
    } | {tensors.payload.data_ptr(): "payload"}

    def told() -> tuple[set[str], set[str]]:
        """Return the tensors that changed, and the other ones."""
        rows: dict[str, int] = dict.fromkeys(names.values(), 0)

        def touched(tensor: torch.Tensor, at: Rows) -> None:
            rows[names[tensor.data_ptr()]] += len(row_numbers(at, tensor.shape[0]))

        tensors.tell_touched(touched)
        changed = {name for name, count in rows.items() if count}
        return changed, rows.keys() - changed

    everything, first = set(names.values()), tensors.portions[0]
    of_first = [list(tensors.weights)[at] for at in first]
    assert told() == (everything - {"payload"}, {"payload"})
    assert told() == (set(), everything)
    _moved(model, 0.5)
    data = tensors.encode(0)
    assert told() == ({"payload"}, everything - {"payload"})
    tensors.adopt(Merge(portion=0, weights=(1,), whole=1, own=0), [data])
    expected = {f"{kind}.{name}" for kind in ("weights", "momentum") for name in of_first}
    assert told() == (expected, everything - expected)
    tensors.load(lambda own: None)
    assert told() == (everything - {"payload"}, {"payload"})
