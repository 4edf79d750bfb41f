"""A vLLM server reads the weights that were put into a folder, and only what changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.checkpoints import sample_arrays, write_checkpoint

from holdfast.adapters.rl.engines.weight_folder import WeightFolder
from holdfast.adapters.vllm.sources import (
    PublishedWeights,
    SavedWeights,
    WantedWeights,
    source_of,
)
from holdfast.ckpt.checkpoints.source import PackSource, StoreSource
from holdfast.ckpt.errors import NotFoundError
from holdfast.elastic.errors import ConfigError


def weights_of(number: float) -> dict[str, torch.Tensor]:
    """Return two tensors, of which one never changes."""
    return {
        "lm.fixed": torch.arange(40000.0),
        "lm.moving": torch.full((300,), number, dtype=torch.bfloat16),
    }


def source(root: Path, **more: str) -> Any:
    """Return the source of a server."""
    return source_of({"holdfast": {"checkpoints": str(root), **more}})


def test_a_server_reads_what_was_put_and_only_what_changed(tmp_path: Path) -> None:
    folder, reader = WeightFolder(tmp_path), source(tmp_path, prefix="lm.")
    for version in range(4):
        weights = weights_of(version)
        place = folder.put(weights, version=version)
        assert folder.put(weights, version=version) == place, "it is written once"
        found = reader.fetch(WantedWeights(version=version, **place))
        assert found.version == version
        assert set(found.tensors) == {"fixed", "moving"}
        assert torch.equal(found.tensors["moving"], weights["lm.moving"])
        assert torch.equal(found.tensors["fixed"], weights["lm.fixed"])
        whole = sum(each.nbytes for each in weights.values())
        assert found.read_bytes >= whole if not version else found.read_bytes < whole / 10
    steps = sorted(each.name for each in (tmp_path / folder.name).glob("step*"))
    assert len(steps) == 2, "the newest two stay"


def test_of_a_step_of_many_writers_the_places_of_its_names_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[str]] = []
    tensors = StoreSource.tensors

    def noted(source: StoreSource, names: Iterable[str]) -> PackSource:
        asked.append({*names})
        return tensors(source, asked[-1])

    monkeypatch.setattr(StoreSource, "tensors", noted)
    found = []
    for writers, register_from in ((4, 2), (4, 5)):
        root = tmp_path / str(register_from)
        write_checkpoint(
            root,
            sample_arrays(),
            world_size=writers,
            step=1,
            aliases={"model.tied": "model.weight"},
            register_from=register_from,
        )
        reader = source(root, prefix="model.")
        found.append(reader.fetch(WantedWeights(version=1)))
        assert reader.fetch(WantedWeights(version=1)).read_bytes == 0
    of_register, of_indexes = found
    assert of_register.digest == of_indexes.digest
    assert of_register.tensors.keys() == of_indexes.tensors.keys()
    for name, tensor in of_indexes.tensors.items():
        assert torch.equal(bits(of_register.tensors[name]), bits(tensor))
    assert all(name.startswith("model.") for names in asked for name in names)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_a_version_that_comes_again_with_other_weights_is_another_one(tmp_path: Path) -> None:
    folder, reader = WeightFolder(tmp_path), source(tmp_path)
    one = reader.fetch(WantedWeights(version=3, **folder.put(weights_of(1), version=3)))
    two = reader.fetch(WantedWeights(version=3, **folder.put(weights_of(2), version=3)))
    assert one.digest != two.digest
    folder.remove()
    with pytest.raises(NotFoundError):
        reader.fetch(WantedWeights(version=3, folder=folder.name, step=2))


def test_parts_of_tensors_are_refused(tmp_path: Path) -> None:
    part = torch.zeros(3)
    part.full_tensor = lambda: part  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"load: w is a Tensor: give whole tensors"):
        WeightFolder(tmp_path).put({"w": part}, version=1)


@pytest.mark.parametrize(
    "given", [None, {}, {"holdfast": {}}, {"holdfast": {"checkpoints": "a", "meeting": "b"}}]
)
def test_a_server_needs_one_place(given: Any) -> None:
    with pytest.raises(ConfigError, match="has no place of weights"):
        source_of(given)


def test_the_place_says_which_kind_of_source_it_is(tmp_path: Path) -> None:
    assert isinstance(source(tmp_path), SavedWeights)
    assert isinstance(source_of({"holdfast": {"meeting": "m"}}), PublishedWeights)
    with pytest.raises(NotFoundError, match="no name begins with 'other'"):
        place = WeightFolder(tmp_path).put(weights_of(1), version=1)
        source(tmp_path, prefix="other").fetch(WantedWeights(version=1, **place))
