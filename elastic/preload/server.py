"""The process that imports modules once, and forks a node's workers on its agent's orders.

It runs as a script, with the interpreter's options of a worker. As a module it would leave frames
of ``runpy`` below the user's, and need an option that keeps the user's folder off the path.
"""

_FRESH = dict(globals())  # the namespace of a script at its first line, in this version of Python
import sys  # noqa: E402

if not sys.flags.safe_path:
    sys.path.pop(0)  # this folder

import os  # noqa: E402
import signal  # noqa: E402

from holdfast.ckpt.descriptors import read_configuration  # noqa: E402
from holdfast.elastic.preload.forking import serve  # noqa: E402
from holdfast.elastic.preload.running import run, search_path_entry  # noqa: E402
from holdfast.elastic.preload.wire import ServerConfig  # noqa: E402


def main() -> None:
    """Serve until the owner ends; in a forked worker, run the program."""
    interrupt = signal.getsignal(signal.SIGINT)
    config = read_configuration(
        ServerConfig, prog="holdfast.elastic.preload.server", description=__doc__
    )
    signal.signal(signal.SIGINT, interrupt)  # workers have it; no terminal reaches this process
    if not sys.flags.safe_path:
        sys.path.insert(0, search_path_entry(config.task.program))
    if (task := serve(config)) is not None:
        run(task.program, fresh=_FRESH, command=task.command)
    else:
        os._exit(0)


if __name__ == "__main__":
    main()
