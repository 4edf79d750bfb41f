"""DeepSpeed's ``universal_checkpoint_info`` as patterns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from doubles.interchange import ArraySource, read_all

from holdfast.ckpt.convert.patterns.choice import Patterns
from holdfast.ckpt.convert.patterns.source import PatternedSource
from holdfast.ckpt.convert.patterns.universal import universal_patterns
from holdfast.ckpt.errors import ArgumentError, MismatchError

INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": 5,
    "vocabulary_parameter_patterns": [r"embed\.weight"],
    "tp_replicated_parameter_patterns": [r"layers\.\d+\.norm", r"final"],
    "parameter_to_average_patterns": [r"layers\.\d+\.scale"],
    "parameter_with_row_parallelism_patterns": [r"layers\.\d+\.dense\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"layers\.\d+\.gated\.weight"],
    "pipeline_replicated_parameter_patterns": [r"embed\.weight"],
}


@dataclass
class SubparamShape:
    patterns: list[str]
    shape: tuple[Any, ...]
    partition_dim: int


def merged(pieces: dict[str, list[Any]], info: dict[str, Any] = INFO) -> dict[str, Any]:
    source = ArraySource(
        {
            f"{rank}.{name}": (np.asarray(each, np.float32), "float32")
            for name, parts in pieces.items()
            for rank, each in enumerate(parts)
        }
    )
    file = universal_patterns(info, origin="mp_rank_00")
    made = PatternedSource(source, Patterns(file=file))
    return {
        name: np.frombuffer(data, np.float32).reshape(made.specs[name].shape)
        for name, data in read_all(made).items()
    }


def check(name: str, parts: list[Any], wanted: Any, info: dict[str, Any] = INFO) -> None:
    np.testing.assert_array_equal(merged({name: parts}, info)[name], wanted)


def test_every_key_has_its_pattern() -> None:
    check("layers.0.other", [[1, 2], [3]], [1, 2, 3])
    check("layers.0.norm.weight", [[1, 2], [1, 2]], [1, 2])
    check("layers.1.scale", [[1, 2], [3, 2]], [2, 2])
    check("layers.1.dense.weight", [[[1], [2]], [[3], [4]]], [[1, 3], [2, 4]])
    check("layers.1.gated.weight", [[1, 5], [2, 6]], [1, 2, 5, 6])
    check("embed.weight", [[[1], [2], [3]], [[4], [5], [9]]], [[1], [2], [3], [4], [5]])
    with pytest.raises(MismatchError, match=r"mp_rank_00: tp_replicated_parameter_patterns: the"):
        merged({"final.weight": [[1], [2]]})


@pytest.mark.parametrize("as_dict", [True, False])
def test_parts_of_a_parameter_are_cut_along_their_dim(as_dict: bool) -> None:
    fields = {"patterns": [r"qkv"], "shape": ((4, 2, 2), -1), "partition_dim": 0}
    sub = fields if as_dict else SubparamShape(**fields)  # type: ignore[arg-type]
    info = {"parameter_with_sub_params": [sub]}
    ranks = [[[1], [2], [5], [7]], [[3], [4], [6], [8]]]
    check("qkv.weight", ranks, [[n] for n in range(1, 9)], info)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"new_key": 1}, "the key new_key is not known; known are original_vocab_size"),
        ({"vocabulary_parameter_patterns": ["a"]}, "original_vocab_size is None; give a whole"),
        ({"parameter_to_average_patterns": "a"}, "is 'a'; give a list of regular expressions"),
        ({"parameter_to_average_patterns": ["("]}, "a regular expression of `where` is wrong"),
        ({"parameter_with_sub_params": [{"patterns": ["a"]}]}, "no shape and partition_dim"),
        (
            {"parameter_with_sub_params": [{"patterns": [], "shape": ((0,),), "partition_dim": 0}]},
            r"widths \(0,\); give whole numbers",
        ),
    ],
)
def test_a_mapping_that_is_not_understood_is_refused(info: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as found:
        universal_patterns(info, origin="mp_rank_00")
    assert str(found.value).startswith("mp_rank_00")
