"""Patterns between the source and the sink of a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from doubles.interchange import ArraySource, read_all

from holdfast.ckpt.convert.interchange import cut, itemsize_of
from holdfast.ckpt.convert.patterns.choice import Patterns
from holdfast.ckpt.convert.patterns.pattern_files import parse
from holdfast.ckpt.convert.patterns.source import PatternedSource
from holdfast.ckpt.errors import ArgumentError, MismatchError
from holdfast.ckpt.geometry.grid import whole

Array = npt.NDArray[Any]


def patterned(
    arrays: Mapping[str, Array],
    text: str,
    *,
    sizes: Mapping[str, int] | None = None,
    reverse: bool = False,
    **more: Any,
) -> PatternedSource:
    source = ArraySource({name: (each, str(each.dtype)) for name, each in arrays.items()}, **more)
    file = parse("format = 1\n" + text, origin="mine.toml")
    return PatternedSource(source, Patterns(file=file, sizes=sizes or {}, reverse=reverse))


def arrays_of(source: PatternedSource) -> dict[str, Array]:
    """Return every tensor, read in boxes of a few elements."""
    found = {}
    for name, spec in source.specs.items():
        array = np.zeros(spec.shape, spec.dtype)
        for box in cut(whole(spec.shape), itemsize=itemsize_of(spec), most_bytes=12):
            data = source.read(name, box)
            array[box.slices] = np.frombuffer(data, spec.dtype).reshape(box.shape)
        whole_bytes = source.read(name, whole(spec.shape))
        assert bytes(whole_bytes) == array.tobytes()
        found[name] = array
    return found


def numbers(*shape: int, start: int = 0) -> Array:
    return (np.arange(np.prod(shape, dtype=int), dtype=np.int32) + start).reshape(shape)


def check(
    pieces: Mapping[str, Array],
    text: str,
    wanted: Mapping[str, Array],
    *,
    sizes: Mapping[str, int] | None = None,
    back: Mapping[str, int] | None = None,
) -> None:
    """Compare the tensors of the pieces, and the pieces of the tensors."""
    found = arrays_of(patterned(pieces, text, sizes=sizes))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)
    again = arrays_of(
        patterned(wanted, text, sizes={**(sizes or {}), **(back or {})}, reverse=True)
    )
    assert again.keys() == pieces.keys()
    for name, array in pieces.items():
        np.testing.assert_array_equal(again[name], array)


ROWS = """
[[pattern]]
name = "rows"
pieces = "tp{tp}.{name...}"
whole = "{name...}"
join = [{ over = "tp", as = "fragment", axis = 1 }]
"""


def test_fragments_along_an_axis_form_the_whole() -> None:
    full = numbers(3, 8)
    pieces = {f"tp{i}.a.w": full[:, 2 * i : 2 * i + 2] for i in range(4)}
    check(pieces, ROWS, {"a.w": full}, back={"tp": 4})


def test_fragments_may_have_uneven_widths() -> None:
    full, text = numbers(2, 7), ROWS.replace("axis = 1", "axis = -1, widths = [4, 2, 1]")
    pieces = {"tp0.w": full[:, :4], "tp1.w": full[:, 4:6], "tp2.w": full[:, 6:]}
    check(pieces, text, {"w": full})
    assert np.array_equal(arrays_of(patterned(pieces, ROWS))["w"], full)
    with pytest.raises(
        MismatchError, match=r"mine\.toml: pattern 'rows'.*\[4, 2, 1\].*\[1, 1, 5\]"
    ):
        patterned(pieces, text.replace("4, 2, 1", "1, 1, 5"))


def test_replicas_must_be_equal() -> None:
    text = ROWS.replace('"fragment", axis = 1', '"replicate"')
    same = numbers(3)
    check({"tp0.n": same, "tp1.n": same.copy()}, text, {"n": same}, back={"tp": 2})
    with pytest.raises(
        MismatchError, match=r"mine\.toml: pattern 'rows': the replicas tp0\.n and tp1\.n differ"
    ):
        arrays_of(patterned({"tp0.n": same, "tp1.n": same + 1}, text))
    with pytest.raises(MismatchError, match=r"has shape \[3\], tp=1 \[2\]"):
        patterned({"tp0.n": same, "tp1.n": same[:2]}, text)


def test_ranks_share_the_comparison_of_replicas() -> None:
    text = ROWS.replace('"fragment", axis = 1', '"replicate"')
    same = numbers(3)
    pieces = {"tp0.a": same, "tp1.a": same, "tp0.b": same, "tp1.b": same + 1}
    source = patterned(pieces, text)
    source.check_replicas(rank=0, ranks=2)
    with pytest.raises(MismatchError, match=r"the replicas tp0\.b and tp1\.b differ"):
        source.check_replicas(rank=1, ranks=2)
    with pytest.raises(MismatchError, match=r"the replicas tp0\.b and tp1\.b differ"):
        source.check_replicas()


def test_the_average_of_equal_bits_is_these_bits() -> None:
    text = ROWS.replace('"fragment", axis = 1', '"average"')
    odd = np.array([0.1, np.nan, -0.0, 1e-40], np.float32)
    found = patterned({f"tp{i}.n": odd for i in range(3)}, text)
    assert read_all(found)["n"] == odd.tobytes()
    found = patterned({"tp0.n": odd[:1], "tp1.n": odd[:1] * 2}, text)
    assert arrays_of(found)["n"] == np.float32((np.float64(odd[0]) + odd[0] * 2) / 2)
    with pytest.raises(MismatchError, match=r"tp0\.n .* int32, of which there is no mean"):
        arrays_of(patterned({"tp0.n": numbers(2), "tp1.n": numbers(2, start=1)}, text))


def test_the_average_of_bfloat16_is_rounded_once() -> None:
    text = "format = 1" + ROWS.replace('"fragment", axis = 1', '"average"')
    raw = [np.array([0x3F80, 0x4000], np.uint16), np.array([0x4000, 0x4000], np.uint16)]
    source = ArraySource({f"tp{i}.n": (each, "bfloat16") for i, each in enumerate(raw)})
    made = PatternedSource(source, Patterns(file=parse(text, origin="mine.toml")))
    assert read_all(made)["n"] == np.array([0x3FC0, 0x4000], np.uint16).tobytes()


FUSED = """
[[pattern]]
name = "qkv"
pieces = "tp{tp}.{layer}.qkv"
whole = "{layer}.{part}"
join = [{ over = "tp", as = "fragment" }]
split = [{ over = "part", as = "fragment", groups = "kv", widths = { q = "per", k = 1, v = 1 } }]
"""


def test_fused_heads_in_groups_are_taken_apart() -> None:
    """Four groups of two query heads, a key head and a value head, each of three rows."""
    fused = numbers(4, 4, 3, 2)
    rows = fused.reshape(48, 2)
    pieces = {"tp0.5.qkv": rows[:24], "tp1.5.qkv": rows[24:]}
    wanted = {
        "5.q": fused[:, :2].reshape(24, 2),
        "5.k": fused[:, 2].reshape(12, 2),
        "5.v": fused[:, 3].reshape(12, 2),
    }
    check(pieces, FUSED, wanted, sizes={"kv": 4, "per": 2}, back={"tp": 2})
    with pytest.raises(ArgumentError, match=r"needs the size per, .* --set per=NUMBER"):
        patterned(pieces, FUSED)
    with pytest.raises(MismatchError, match=r"48 is no whole number; correct the widths"):
        patterned(pieces, FUSED, sizes={"kv": 5, "per": 2})


def test_parts_inside_of_pieces_come_together() -> None:
    gate, up = numbers(6, 2), numbers(6, 2, start=100)
    text = ROWS.replace("axis = 1", "sub = [1, 1]")
    pieces = {f"tp{i}.w": np.concatenate([gate[s], up[s]]) for i, s in enumerate(thirds())}
    check(pieces, text, {"w": np.concatenate([gate, up])}, back={"tp": 3})


def thirds() -> list[slice]:
    return [slice(0, 2), slice(2, 4), slice(4, 6)]


def test_heads_that_neighbours_share_are_compared_and_kept_once() -> None:
    q, k = numbers(8, 1), numbers(2, 1, start=50)
    text = ROWS.replace("axis = 1", "sub = [2, 1], copies = [1, 2]")
    pieces = {
        f"tp{i}.w": np.concatenate([q[2 * i : 2 * i + 2], k[i // 2 : i // 2 + 1]]) for i in range(4)
    }
    check(pieces, text, {"w": np.concatenate([q, k])}, back={"tp": 4})
    pieces["tp1.w"] = pieces["tp1.w"] + 1
    with pytest.raises(MismatchError, match=r"the replicas tp0\.w and tp1\.w differ"):
        arrays_of(patterned(pieces, text))


STACK = """
[[pattern]]
pieces = "decoder.{name...}"
whole = "layers.{layer:02}.{name...}"
split = [{ over = "layer", as = "stack" }]
"""


def test_layers_in_one_tensor_are_taken_apart() -> None:
    full = numbers(3, 2, 2)
    wanted = {f"layers.0{i}.w": full[i] for i in range(3)}
    check({"decoder.w": full}, STACK, wanted)
    scalars = {f"layers.0{i}.w": full[0, 0, 0] + i for i in range(2)}
    check({"decoder.w": np.array([0, 1], np.int32)}, STACK, scalars)
    with pytest.raises(MismatchError, match="is a scalar and has no axis 0"):
        patterned({"decoder.w": np.array(1, np.int32)}, STACK)


def test_steps_nest() -> None:
    """Copies of fragments of layers: three holes of one name."""
    full = numbers(2, 6)
    text = """
    [[pattern]]
    pieces = "{dp}/{tp}/{layer}"
    whole = "all"
    join = [
      { over = "dp", as = "replicate" },
      { over = "layer", as = "stack" },
      { over = "tp", as = "fragment", axis = 1 },
    ]
    """
    pieces = {
        f"{dp}/{tp}/{layer}": full[layer, 3 * tp : 3 * tp + 3]
        for dp in range(2)
        for tp in range(2)
        for layer in range(2)
    }
    check(pieces, text, {"all": full}, back={"dp": 2, "tp": 2})


TRIM = """
[[pattern]]
name = "words"
pieces = "tp{tp}.embed"
whole = "embed"
join = [{ over = "tp", as = "fragment" }]
trim = { to = "vocabulary", multiple = 4 }
"""


def test_padding_is_taken_off_and_put_back() -> None:
    full = numbers(6, 2, start=1)
    padded = np.concatenate([full, np.zeros((2, 2), np.int32)])
    pieces = {"tp0.embed": padded[:4], "tp1.embed": padded[4:]}
    check(pieces, TRIM, {"embed": full}, sizes={"vocabulary": 6}, back={"tp": 2})
    check(pieces, TRIM, {"embed": padded}, sizes={"vocabulary": 8}, back={"tp": 2})


def test_padding_that_is_not_zero_is_refused_or_reported() -> None:
    pieces = {"tp0.embed": numbers(4, 2), "tp1.embed": numbers(4, 2)}
    with pytest.raises(
        MismatchError, match=r"mine\.toml: pattern 'words': .*from 6 on .* is not zero"
    ):
        patterned(pieces, TRIM, sizes={"vocabulary": 6})
    with pytest.raises(MismatchError, match="has 8 along axis 0, trimmed to 9"):
        patterned(pieces, TRIM, sizes={"vocabulary": 9})
    dropping = TRIM.replace("multiple = 4", 'padding = "drop"')
    found = patterned(pieces, dropping, sizes={"vocabulary": 6})
    assert found.told == (
        "arrays in memory: tp0.embed: 2 of 8 along axis 0 were dropped as padding",
    )


def test_missing_pieces_are_named() -> None:
    pieces = {"tp0.w": numbers(1, 2), "tp2.w": numbers(1, 2)}
    with pytest.raises(MismatchError, match=r"misses its pieces 1 \(found tp 0, 2"):
        patterned(pieces, ROWS)
    with pytest.raises(MismatchError, match=r"misses its pieces 2 .* --set tp=NUMBER"):
        patterned({"tp0.w": numbers(1, 2), "tp1.w": numbers(1, 2)}, ROWS, sizes={"tp": 3})
    with pytest.raises(MismatchError, match=r"would have 1000000001 pieces"):
        patterned({"tp1000000000.w": numbers(1, 2)}, ROWS)


def test_a_unique_piece_may_lie_at_any_rank() -> None:
    text = ROWS.replace('"fragment", axis = 1', '"unique"')
    found = patterned({"tp3.a": numbers(2), "tp0.b": numbers(2)}, text)
    assert list(found.specs) == ["a", "b"]
    with pytest.raises(MismatchError, match=r"is unique, and 2 pieces have it \(of tp 0, 1\)"):
        patterned({"tp0.a": numbers(2), "tp1.a": numbers(2)}, text)


def test_names_that_no_pattern_or_two_match_are_refused() -> None:
    with pytest.raises(MismatchError, match=r"other: no pattern of mine\.toml matches; .* `drop`"):
        patterned({"other": numbers(2)}, ROWS)
    with pytest.raises(MismatchError, match=r"tp0\.w: two patterns match, .*'rows' and .*'rows'"):
        patterned({"tp0.w": numbers(2)}, ROWS + ROWS)
    rest = ROWS + '[[pattern]]\npieces = "{all...}"\nwhole = "{all...}"\notherwise = true\n'
    found = patterned({"tp0.w": numbers(2, 1), "other": numbers(2)}, rest)
    assert list(found.specs) == ["w", "other"]


def test_dropped_names_are_reported_and_refused_ones_refused() -> None:
    head = 'drop = ["*._extra"]\n'
    found = patterned({"tp0.w": numbers(2, 1), "tp0._extra": numbers(2)}, head + ROWS)
    assert list(found.specs) == ["w"]
    assert found.told == ("1 tensors were left out, as mine.toml says: tp0._extra",)
    refusing = ROWS + '[[refuse]]\nnames = "bucket.*"\nremedy = "save it in another form"\n'
    with pytest.raises(MismatchError, match=r"refuses bucket\.\*: save it in another form"):
        patterned({"bucket.1": numbers(2)}, refusing)


def test_two_tensors_of_one_new_name_are_refused() -> None:
    text = ROWS + '[[pattern]]\npieces = "also"\nwhole = "w"\n'
    with pytest.raises(MismatchError, match=r"also would be w, which .*'rows' makes too"):
        patterned({"tp0.w": numbers(2, 1), "also": numbers(2)}, text)


def test_pieces_of_two_types_are_refused() -> None:
    with pytest.raises(MismatchError, match=r"tp0\.w is int32, tp1\.w is float32"):
        patterned({"tp0.w": numbers(2, 1), "tp1.w": np.zeros((2, 1), np.float32)}, ROWS)


def test_tied_tensors_stay_tied() -> None:
    text = '[[pattern]]\npieces = "old.{name...}"\nwhole = "{name...}"\n'
    found = patterned({"old.embed": numbers(2)}, text, aliases={"old.head": "old.embed"})
    assert (list(found.specs), found.aliases) == (["embed"], {"head": "embed"})


def test_plain_values_and_their_references_are_renamed() -> None:
    text = ROWS.replace('"fragment", axis = 1', '"replicate"')
    values = {
        "tp0.step": 7,
        "tp1.step": 7,
        "lr": 0.1,
        "tp0.tree": {"a": [{"$tensor": "tp1.n"}]},
    }
    same = numbers(2)
    found = patterned({"tp0.n": same, "tp1.n": same}, text, values=values)
    assert found.values == {"step": 7, "lr": 0.1, "tree": {"a": [{"$tensor": "n"}]}}
    with pytest.raises(MismatchError, match=r"tp0\.step and tp1\.step would both be step"):
        patterned({"tp0.n": same}, text, values={"tp0.step": 1, "tp1.step": 2})
    with pytest.raises(MismatchError, match=r"lr refers to the tensor tp0\.w, which the patterns"):
        pieces = {"tp0.w": numbers(1, 2), "tp1.w": numbers(1, 2)}
        patterned(pieces, ROWS, values={"lr": {"$tensor": "tp0.w"}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pattern = 1", r"mine\.toml: .*Expected `array`"),
        ("[[pattern", r"mine\.toml: no TOML: .* correct that line"),
        (ROWS.replace("fragment", "chunk"), r"as = 'chunk'; choose one of unique, replicate"),
        (ROWS.replace("axis", "axes"), r"contains unknown field `axes`"),
        (ROWS.replace("{name...}", "{name..}"), r"is no name with holes"),
        (ROWS.replace('whole = "{name...}"', 'whole = "x"'), r"\{name\} of pieces has no step"),
        (ROWS.replace('over = "tp"', 'over = "dp"'), r"\{tp\} of pieces has no step"),
        (ROWS.replace('"fragment"', '"replicate"'), r"replicate has no axis"),
        (ROWS.replace("axis = 1", "sub = [1], copies = [1, 2]"), r"2 copies for 1 parts"),
        (ROWS.replace("axis = 1", "sub = [1], groups = 2"), r"`sub` or `groups`"),
        (ROWS + 'where = { name = "(" }', r"a regular expression of `where` is wrong"),
        (ROWS + 'where = { tp = "1" }', r"`where` tp, which a step counts"),
        (ROWS + 'where = { other = "1" }', r"no name has the hole \{other\}"),
        (TRIM.replace("multiple = 4", 'padding = "any"'), r"padding = 'any'; choose one of zero"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(text: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as found:
        patterned({}, text)
    assert str(found.value).startswith("mine.toml")


def test_closing_closes_the_source_and_the_step_is_its_own() -> None:
    found = patterned({"tp0.w": numbers(1, 1)}, ROWS)
    assert found.step is None
    found.close()
