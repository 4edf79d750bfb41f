"""`holdfast dashboard`: show a run in the browser."""

from __future__ import annotations

import argparse
import socket
import webbrowser
from pathlib import Path
from typing import Final

from holdfast.tools.live.options import add_options, follower
from holdfast.tools.subcommand import HelpFormatter, Subparsers
from holdfast.tools.terminal import console

PORT: Final = 8765
_LOOPBACK: Final = "127.0.0.1"
_ALL: Final = ("0.0.0.0", "::")

_EPILOG: Final = """\
examples:
  holdfast run --run-dir runs/live --nodes 4 train.py &
  holdfast dashboard runs/live                    prints the address to open
  holdfast dashboard runs/live --browser          opens it
  holdfast dashboard runs/live --checkpoints ckpt lists the checkpoints that are there
  holdfast dashboard runs/live --export run.html  one file to keep or to send
  holdfast dashboard machine0/run machine1/run    a job on two machines, from a copy of each
  holdfast dashboard --coordinator head:29400     its members and protection, without its past
  ssh -L 8765:localhost:8765 head                 looks at a run on another machine

The dashboard reads the events in RUN_DIR and asks the nodes; the run does not need it and does
not notice it. A run that is over opens in the same page. The address holds a random token:
whoever has it can read the run. Ctrl-C ends the dashboard, and never the run.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "dashboard",
        help="show a run in the browser as it goes: nodes, recoveries, protection, checkpoints",
        description="Serves a page that shows a run as it goes: its nodes, the timeline of steps, "
        "faults and recoveries, the protection and what a loss would cost, checkpoints, and the "
        "planner's reasons.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add_options(add)
    add(
        "--host",
        default=_LOOPBACK,
        metavar="ADDRESS",
        help="address to serve at (default: the loopback, which only this machine reaches)",
    )
    add(
        "--port",
        type=_port,
        metavar="N",
        help=f"port to serve at, 0 for any (default: {PORT}, or any if that one is taken)",
    )
    add("--browser", action="store_true", help="open the page in the browser")
    add("--no-browser", dest="browser", action="store_false", help=argparse.SUPPRESS)
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file of the token, made if it is not there: pages connect again after a restart "
        "(default: a new token each time)",
    )
    add(
        "--checkpoints",
        metavar="ROOT",
        help="directory or URL of the run's checkpoints: lists them, with a quick check of each "
        "and the pins (default: only what the events tell of them)",
    )
    add(
        "--export",
        type=Path,
        metavar="FILE",
        help="write the run so far as one HTML file that needs no network, and end",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted, or write the file."""
    followed = follower(args)
    if args.export:
        from holdfast.tools.dashboard.export import write

        write(args.export, followed)
        console().print(f"written: {args.export}", markup=False, soft_wrap=True)
        return 0
    import uvicorn

    from holdfast.tools.dashboard.export import render
    from holdfast.tools.dashboard.foretelling import Foreteller
    from holdfast.tools.dashboard.guard import token_of
    from holdfast.tools.dashboard.hub import Hub
    from holdfast.tools.dashboard.server import Dashboard
    from holdfast.tools.dashboard.stored import Shelf

    token = token_of(args.token_file)
    hub = Hub(followed, shelf=Shelf(args.checkpoints) if args.checkpoints else None)
    foretell = Foreteller(followed)
    dashboard = Dashboard(
        hub,
        losses=foretell,
        report=lambda: render(hub.view, followed.run_dirs),
    )
    with _listener(args.host, args.port) as listener:
        host, port = listener.getsockname()[:2]
        hosts = ("*", socket.gethostname(), socket.getfqdn()) if args.host in _ALL else (args.host,)
        config = uvicorn.Config(
            dashboard.app(token=token, hosts=hosts),
            log_level="critical",
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        address = _address(host, port, token)
        hub.start()
        try:
            _tell(args, followed.place, address)
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            hub.close()
            foretell.close()
            followed.close()
    return 0


def _listener(host: str, port: int | None) -> socket.socket:
    """Return a listening socket; without a wanted port another one is taken if `PORT` is busy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return _bound(family, host, PORT if port is None else port)
    except OSError:
        if port is not None:
            raise
        return _bound(family, host, 0)


def _bound(family: int, host: str, port: int) -> socket.socket:
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen()
    except OSError as error:
        found.close()
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from None
    return found


def _address(host: str, port: int, token: str) -> str:
    name = socket.gethostname() if host in _ALL else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/#{token}"


def _tell(args: argparse.Namespace, place: str, address: str) -> None:
    shown = console(stderr=True)
    if args.host not in (_LOOPBACK, "localhost", "::1"):
        shown.print(
            f"warning: {args.host} can be reached from the network, and the page goes there "
            "without encryption: whoever reads the traffic has the token. An SSH tunnel is safer: "
            "leave --host out, and forward the port",
            style="yellow",
            markup=False,
        )
    print(f"dashboard of {place}: {address}", flush=True)
    if args.browser:
        webbrowser.open(address)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)
