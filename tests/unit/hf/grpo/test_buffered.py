"""Open rounds: in the state, and in the file of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_packages import needs

pytestmark = needs("transformers", "accelerate", "safetensors")


def rounds_of(**given: int) -> Any:
    """Return empty rounds of four steps: two slices, each of one microbatch, for two iterations."""
    from holdfast.adapters.hf.grpo.buffered import BufferedRounds
    from holdfast.adapters.hf.grpo.shape import Epochs, RoundShape

    plain = {"rows": 2, "group": 2, "slices": 2, "iterations": 2, "microbatches": 1}
    finished: Any = SimpleNamespace(writers=[("trainer/0", "n0")], inherited=[])
    finished.inherit = finished.inherited.extend
    shape = RoundShape(**{**plain, **given})
    return BufferedRounds(shape, Epochs(microbatches=8, most=1), finished)


def slices(number: int) -> list[dict[str, Any]]:
    return [
        {"ids": torch.full((2, 3), number * 10 + part), "num_images": [part]} for part in (0, 1)
    ]


def test_a_step_samples_the_rounds_that_it_lacks_and_drops_those_that_are_spent() -> None:
    rounds = rounds_of()
    assert rounds.missing(0) == [(0, 0)]
    rounds.add(0, 0, slices(0))
    assert rounds.missing(3) == []
    assert rounds.at(0, 3)["num_images"] == [1]
    rounds.drop_spent(3)
    assert rounds.missing(3) == []
    rounds.drop_spent(4)
    assert rounds.missing(3) == [(0, 0)]
    assert rounds.missing(4) == [(0, 1)]
    assert rounds.missing(8) == [(1, 0)], "the next epoch"


def test_open_rounds_come_back_from_the_state() -> None:
    first, again = rounds_of(), rounds_of()
    first.add(0, 1, slices(1))
    again.load_state_dict(first.state_dict())
    assert again.missing(4) == []
    assert torch.equal(again.at(0, 5)["ids"], torch.full((2, 3), 11))
    assert again._finished.inherited == [("trainer/0", "n0")]


def test_open_rounds_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    first, again = rounds_of(), rounds_of()
    first.add(0, 1, slices(1))
    first.save(tmp_path)
    again.load(tmp_path, 5)
    assert torch.equal(again.at(0, 5)["ids"], torch.full((2, 3), 11))
    assert again.at(0, 6)["num_images"] == [0]


def test_a_checkpoint_without_an_open_round_is_refused_unless_none_is_open(tmp_path: Path) -> None:
    from holdfast.elastic import ConfigError

    rounds_of().load(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"in the middle of a round.*steps x 1 .* multiple of 4"):
        rounds_of().load(tmp_path, 5)


def test_rounds_of_another_shape_and_other_files_are_refused(tmp_path: Path) -> None:
    from holdfast.ckpt import CorruptError
    from holdfast.elastic import ConfigError

    first = rounds_of()
    first.save(tmp_path)
    with pytest.raises(ConfigError, match=r"other settings: iterations 2 \(now 3\)"):
        rounds_of(iterations=3).load(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"other settings: slices 2 \(now 4\)"):
        rounds_of(slices=4).load_state_dict(first.state_dict())
    (tmp_path / "holdfast_rounds.safetensors").write_bytes(b"none")
    with pytest.raises(CorruptError, match="no rounds of completions"):
        rounds_of().load(tmp_path, 1)
