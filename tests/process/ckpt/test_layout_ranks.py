"""Real ranks in every layout load each other's states, bit for bit, optimizers included."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from pathlib import Path

import layout_bodies
import torch.multiprocessing as mp
from ports import free_ports


def test_every_layout_loads_what_any_other_saved(tmp_path: Path) -> None:
    multiprocessing.set_forkserver_preload(["layout_bodies"])
    mp.start_processes(
        layout_bodies.body, (free_ports(1)[0], tmp_path), nprocs=4, start_method="forkserver"
    )
    forkserver._forkserver._stop()
