"""Named generators follow the seeds of the global ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from holdfast.elastic.seeding import drop_named, named, seed_all

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_others() -> Iterator[None]:
    drop_named()
    yield
    drop_named()


def draws(generator: torch.Generator) -> list[float]:
    return torch.rand(3, generator=generator).tolist()


def test_a_generator_begins_anew_with_every_seed_and_stays_the_same_object() -> None:
    seed_all(1)
    noise = named("noise", CPU)
    first = draws(noise)
    assert draws(noise) != first
    seed_all(2)
    assert draws(noise) != first
    seed_all(1)
    assert named("noise", CPU) is noise
    assert draws(noise) == first


def test_one_that_is_made_late_draws_as_if_it_had_been_there() -> None:
    named("noise", CPU)
    seed_all(1)
    expected = draws(named("noise", CPU))
    drop_named()
    seed_all(1)
    assert draws(named("noise", CPU)) == expected


def test_names_and_the_global_generator_draw_differently() -> None:
    seed_all(1)
    found = [draws(named(name, CPU)) for name in ("", "a", "b")]
    found.append(torch.rand(3).tolist())
    assert len({tuple(each) for each in found}) == 4


def test_draws_of_a_named_one_do_not_move_the_global_one() -> None:
    seed_all(1)
    expected = torch.rand(3).tolist()
    seed_all(1)
    draws(named("noise", CPU))
    assert torch.rand(3).tolist() == expected


def test_torch_draws_as_after_its_own_seed() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3).tolist()
    seed_all(7)
    assert torch.rand(3).tolist() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_draws_as_after_torchs_own_seed() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3, device="cuda").tolist()
    seed_all(7)
    assert torch.rand(3, device="cuda").tolist() == expected
