"""The process that has torch imported and runs scripts in forks of itself: see `forked_scripts`.

It is itself run as a script, as the fork server of a job is.
"""

_FRESH = dict(globals())  # the namespace of a script at its first line, in this version of Python
import sys  # noqa: E402

sys.path.pop(0)  # this folder

import ctypes  # noqa: E402
import gc  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402

import msgspec  # noqa: E402

from holdfast.elastic.preload.loading import load  # noqa: E402
from holdfast.elastic.preload.program import program_of  # noqa: E402
from holdfast.elastic.preload.running import run, search_path_entry  # noqa: E402

MOST_BYTES = 1 << 20
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A command ``python SCRIPT …`` or ``python -m MODULE …``, its folder and its environment."""

    command: tuple[str, ...]
    directory: str
    env: dict[str, str]


def serve(owner: socket.socket) -> tuple[Order, list[int]]:
    """Fork a process for every order, one after the other; return in such a process.

    The owner is told the id of the process, and its wait status when it has ended.
    """
    while True:
        data, fds, _, _ = socket.recv_fds(owner, MOST_BYTES, 2)
        if not data:
            os._exit(0)
        child = os.fork()
        if not child:
            ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
            owner.close()
            return msgspec.json.decode(data, type=Order), fds
        for fd in fds:
            os.close(fd)
        owner.send(str(child).encode())
        owner.send(str(os.waitpid(child, 0)[1]).encode())


def begin(order: Order, fds: list[int]) -> None:
    """Give this process what it would have, had the interpreter been started by the command."""
    for stream, fd in enumerate([os.open(os.devnull, os.O_RDONLY), *fds]):
        os.dup2(fd, stream)
        os.close(fd)
    before = _search_path(os.environ)
    os.environ.clear()
    os.environ.update(order.env)
    os.chdir(order.directory)
    rest = [entry for entry in sys.path if entry not in before]
    program = program_of(order.command, interpreter=sys.executable)
    sys.path[:] = [search_path_entry(program), *_search_path(os.environ), *rest]
    gc.unfreeze()
    import numpy as np
    import torch

    np.random.seed()
    torch.default_generator.seed()  # as every interpreter begins with another one
    if threads := order.env.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    run(program, fresh=_FRESH, command=order.command)


def _search_path(env: "os._Environ[str]") -> list[str]:
    return [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]


def main() -> None:
    """Import the modules that are named, then serve the owner of the descriptor."""
    owner = socket.socket(fileno=int(sys.argv[1]))
    owner.set_inheritable(False)
    load(sys.argv[2:], lambda _: None)
    begin(*serve(owner))


if __name__ == "__main__":
    main()
