"""``python -m holdfast.adapters.rl.environments.processes --config-fd FD``: serve environments."""

from __future__ import annotations

from holdfast.adapters.rl.environments.processes import player, server, wire
from holdfast.ckpt.descriptors import read_configuration

if __name__ == "__main__":
    given = read_configuration(
        wire.EnvironmentServerConfig, prog="environments", description=__doc__
    )
    place = server.serve(given)
    if place is not None:  # this process was forked: it is an environment's
        player.play(*place, given)
