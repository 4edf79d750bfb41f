"""A process notices that the one for which it works is gone."""

from __future__ import annotations

import subprocess

from holdfast.ckpt.owner import OwnerWatch


def test_an_owner_lives_until_it_ends_and_the_next_one_is_followed() -> None:
    watch = OwnerWatch()
    assert not watch.lives(0)
    owners = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)]
    try:
        watch.follow(owners[0].pid)
        assert watch.lives(0)
        owners[0].kill()
        assert not watch.lives(30)
        watch.follow(owners[1].pid)
        assert watch.lives(0)
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()
    watch.follow(2**40)
    assert not watch.lives(0)
    watch.close()
