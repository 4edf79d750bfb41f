"""A forked program behaves as one that the interpreter starts, to its last line and exit status."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from holdfast.ckpt.descriptors import descriptor_of, readable
from holdfast.ckpt.errors import PeerError
from holdfast.elastic.launch.config import python_command
from holdfast.elastic.preload.client import ForkServer, ServerSpec, ServerState, _adopting
from holdfast.elastic.processes.children import Child

DEADLINE_S = 120.0

SURROUNDINGS = """\
'''The docstring.'''
import holdfast  # the hook for uncaught errors comes with it
import __main__, json, os, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
    "executable": sys.executable, "cwd": os.getcwd(), "env": dict(os.environ),
    "names": sorted(vars(__main__)), "file": globals().get("__file__"),
    "spec": __spec__ and [__spec__.name, __spec__.origin],
    "loader": type(__loader__).__name__, "package": __package__, "doc": __doc__,
    "main": __main__ is sys.modules["__main__"] and __main__.__dict__ is globals(),
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "parent": os.getppid(), "umask": os.umask(0o22), "nice": os.nice(0),
    "signals": {n: str(signal.getsignal(n)) for n in (1, 2, 13, 15, 17)},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "streams": [repr(f) for f in (sys.stdin, sys.stdout, sys.stderr)],
    "buffering": [(f.line_buffering, f.write_through) for f in (sys.stdout, sys.stderr)],
    "stdin": os.readlink("/proc/self/fd/0"), "threads": len(os.listdir("/proc/self/task")),
    "descriptors": len(os.listdir("/proc/self/fd")), "hook": sys.excepthook.__name__,
}, sort_keys=True))
"""

ENDINGS = {
    "falls off the end": "print('done')",
    "exit status": "import sys; sys.exit(3)",
    "exit with a message": "raise SystemExit('the end')",
    "uncaught": "def f(x):\n    return 1 / x\n\nprint('before')\nf(0)",
    "chained": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('no a') from e",
    "a hook of its own": (
        "import sys\nsys.excepthook = lambda k, e, t: print(k, t.tb_lineno)\n1 / 0"
    ),
    "interrupted": "raise KeyboardInterrupt",
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "hard exit": "import os; os._exit(9)",
    "syntax": "def f(:\n    pass",
    "atexit": "import atexit\natexit.register(print, 'last')\nprint('first')\nraise SystemExit(4)",
    "a thread that stays": (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread', __name__))).start()\n"
        "print('main')"
    ),
    "unbuffered": "import os, sys\nsys.stdout.write('a part')\nos._exit(0)",
    "no docstring": "print(__doc__, __annotations__)\nx: int = 1\nprint(__annotations__)",
    "last traceback": (
        "import atexit, sys\natexit.register(lambda: print(sys.last_traceback.tb_frame.f_lineno))\n"
        "raise ValueError"
    ),
    "spawn": (
        "import multiprocessing\ndef f(x):\n    return x + 1\n"
        "if __name__ == '__main__':\n"
        "    for how in ('spawn', 'fork', 'forkserver'):\n"
        "        with multiprocessing.get_context(how).Pool(2) as pool:\n"
        "            print(how, pool.map(f, range(3)))"
    ),
}

Ending = tuple[int | None, str]


def executed(command: Sequence[str], log: Path) -> Ending:
    """Return exit status and output of a program that the interpreter starts."""
    child = Child.start(command, env=os.environ, tied=True, output=log, copied=True)
    return child.wait(DEADLINE_S), log.read_text()


def spec(command: Sequence[str], *, output: Path | None = None) -> ServerSpec:
    return ServerSpec(command=command, env=os.environ, name="test", output=output)


@contextlib.contextmanager
def serving(command: Sequence[str], *modules: str) -> Iterator[ForkServer]:
    """Run a fork server, until it is ready or has ended."""
    server = ForkServer.start(modules, spec(command))
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while server.state is ServerState.LOADING:
            assert time.monotonic() < deadline_s
            readable([server.socket.fileno()], 1.0)
            server.check()
        yield server
    finally:
        server.close()
        server.socket.close()


def begun(server: ForkServer, log: Path, **env: str) -> Child:
    return Child.begun(lambda fd: server.fork(env=env, fds=(), output=fd), output=log)


def forked(command: Sequence[str], log: Path) -> Ending:
    """Return exit status and output of the same program, forked."""
    with serving(command, "json", "multiprocessing.pool") as server:
        child = begun(server, log)
        return child.wait(DEADLINE_S), log.read_text()


OWNER = """\
import os, sys
from pathlib import Path
from holdfast.elastic.preload.client import ForkServer
from holdfast.elastic.processes.children import Child
fd, log, result = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
assert os.read(fd, 100) == b"config"
server = ForkServer.inherited(fd + 1)
child = Child.begun(lambda fd: server.fork(env={}, fds=(), output=fd), output=log)
result.write_text(str(child.wait(120)))
"""
"""Of a process that owns a fork server from its start."""


@contextlib.contextmanager
def owning(command: Sequence[str], folder: Path) -> Iterator[tuple[Child, Path, Path]]:
    """Run a process with a server that was forked for it; yield it, its worker's log, its result.

    The server from which that one comes was started in another directory, for another program.
    """
    folder.mkdir()
    (folder / "other.py").touch()
    log, result = folder / "log", folder / "result"
    with contextlib.chdir("/"):
        before = serving(python_command(folder / "other.py", []), "json", "multiprocessing.pool")
        server = before.__enter__()
    with contextlib.ExitStack() as stack:
        stack.push(before)
        read, write = os.pipe()
        stack.callback(os.close, read)
        stack.callback(os.close, write)
        config = stack.enter_context(descriptor_of(b"config"))
        argv = [sys.executable, "-c", OWNER, str(server.first_fd), str(log), str(result)]
        process = server.branch(argv, spec(command), env=os.environ, stdin=read, config=config)
        child = Child(process)
        yield child, log, result
        child.kill()
        child.wait(DEADLINE_S)


def branched(command: Sequence[str], folder: Path) -> Ending:
    """Return exit status and output of the same program, forked by a server that was forked."""
    with owning(command, folder) as (owner, log, result):
        assert owner.wait(DEADLINE_S) == 0
        return int(result.read_text()), log.read_text()


def compare(command: Sequence[str], folder: Path) -> Ending:
    one = executed(command, folder / "executed.log")
    for other in (forked(command, folder / "forked.log"), branched(command, folder / "branched")):
        if one[1].startswith("{"):
            ours, theirs = json.loads(one[1]), json.loads(other[1])
            if other[1] != one[1]:
                theirs["parent"] = ours["parent"]  # a forked server has an owner of its own
            assert theirs == ours  # which says what differs
        else:
            assert other[1] == one[1]
        assert other[0] == one[0]
    return one


@pytest.mark.parametrize("name", ENDINGS)
def test_a_program_ends_in_the_same_way(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDINGS[name])
    status, output = compare(python_command(script, []), tmp_path)
    if name == "uncaught":
        assert status == 1 and f'File "{script}", line 5, in <module>' in output
    if name == "interrupted":
        assert status == -signal.SIGINT


@pytest.mark.parametrize("name", ["deep/script.py", "./deep/../link.py"])
def test_a_script_finds_the_same_surroundings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "script.py").write_text(SURROUNDINGS)
    (tmp_path / "link.py").symlink_to("deep/script.py")
    monkeypatch.chdir(tmp_path)
    status, output = compare(python_command(name, ["a", "-m", "--b=c"]), tmp_path)
    assert status == 0 and f'"parent": {os.getpid()}' in output


@pytest.mark.parametrize("kind", ["module", "package", "folder", "archive", "absent", "no file"])
def test_what_python_runs_besides_scripts_runs_too(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    for name in ("pack/__init__.py", "pack/__main__.py", "pack/inner.py"):
        Path(name).write_text("" if "init" in name else SURROUNDINGS)
    with zipfile.ZipFile("pack.zip", "w") as archive:
        archive.write("pack/__main__.py", "__main__.py")
    command = {
        "module": python_command("-m", ["pack.inner", "x"]),
        "package": python_command("-m", ["pack"]),
        "folder": python_command("pack", ["x"]),
        "archive": python_command("pack.zip", ["x"]),
        "absent": python_command("-m", ["pack.nothing"]),
        "no file": python_command("nothing.py", []),
    }[kind]
    status, _ = compare(command, tmp_path)
    assert status == {"absent": 1, "no file": 2}.get(kind, 0)


def test_workers_share_no_randomness(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing.process, numpy, random, uuid\n"
        "key = bytes(multiprocessing.process.current_process().authkey).hex()\n"
        "print(random.random(), numpy.random.random(), uuid.uuid4(), key, sep='\\n')"
    )
    with serving(python_command(script, []), "numpy", "uuid", "multiprocessing") as server:
        logs = [tmp_path / "a", tmp_path / "b"]
        for log in logs:
            assert begun(server, log).wait(DEADLINE_S) == 0
    one, other = (log.read_text().split() for log in logs)
    assert len(one) == 4
    assert not set(one) & set(other)


def test_a_trainer_has_what_its_first_optimizer_imports(tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(
        "import sys, torch\nbefore = set(sys.modules)\n"
        "torch.optim.AdamW([torch.zeros(1)])\n"
        "print(len(set(sys.modules) - before))"
    )
    with serving(python_command(script, []), "torch") as server:
        assert begun(server, log).wait(DEADLINE_S) == 0
    assert int(log.read_text()) < 5


def test_a_variable_that_an_import_sets_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "setting.py").write_text("import os\nos.environ['SET_BY_IMPORT'] = 'yes'")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, setting\n"
        "subprocess.run('echo $SET_BY_IMPORT $OF_WORKER', shell=True, check=True)"
    )
    with serving(python_command(script, []), "setting") as server:
        assert begun(server, tmp_path / "log", OF_WORKER="1").wait(DEADLINE_S) == 0
    assert (tmp_path / "log").read_text() == "yes 1\n"


def text_of(log: Path) -> str:
    return log.read_text() if log.exists() else ""


SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(1000)"


def test_descriptors_arrive_and_the_server_keeps_none(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nos.write(int(os.environ['FD']), b'hello')")
    with serving(python_command(script, []), "json") as server:
        read, write = os.pipe()
        number = str(server.first_fd + 1)
        child = Child.begun(
            lambda fd: server.fork(env={"FD": number}, fds=(0, write), output=fd), output=None
        )
        os.close(write)
        with os.fdopen(read, "rb") as file:
            assert file.read() == b"hello"  # up to the end: nobody else has the other end
        assert child.wait(DEADLINE_S) == 0


def test_a_server_that_was_forked_belongs_to_its_owner_and_ends_with_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SLEEP)
    with owning(python_command(script, []), tmp_path / "owner") as (owner, log, result):
        deadline_s = time.monotonic() + DEADLINE_S
        while "up" not in text_of(log):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        children = Path(f"/proc/{owner.pid}/task/{owner.pid}/children").read_text().split()
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
        assert len(children) == 2 and all(b"\0test " in line for line in lines)
        owner.signal(signal.SIGTERM)  # goes to the owner alone
        assert owner.wait(DEADLINE_S) == -signal.SIGTERM
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert not result.exists()


def test_stops_and_kills_are_reported_to_the_agent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SLEEP)
    with serving(python_command(script, []), "json") as server:
        child = begun(server, tmp_path / "log")
        child.signal(signal.SIGSTOP)
        await_change(child, "stopped")
        child.signal(signal.SIGCONT)
        await_change(child, "continued")
        child.kill()
        assert child.wait(DEADLINE_S) == -signal.SIGKILL


def await_change(child: Child, wanted: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while (status := child.poll()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert status.change.value == wanted


def test_a_server_that_was_killed_or_stopped_forks_no_more(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SLEEP)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with serving(python_command(script, []), "json") as server:
            child = begun(server, tmp_path / "log")
            server.child.signal(number)
            if number == signal.SIGKILL:
                with pytest.raises(PeerError):
                    begun(server, tmp_path / "other.log")
            deadline_s = time.monotonic() + DEADLINE_S
            while server.state is not ServerState.ENDED:
                assert time.monotonic() < deadline_s
                server.check()
            assert server.why == "killed by SIGKILL" or "forked no worker" in server.why
            assert child.poll() is None  # workers do not need it
            child.kill()
            assert child.wait(DEADLINE_S) == -signal.SIGKILL


def test_an_order_to_a_server_that_is_gone_says_how_it_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    with serving(python_command(script, []), "json") as server:
        server.child.kill()
        os.waitid(os.P_PID, server.child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(PeerError, match=r"^killed by SIGKILL$"):
            begun(server, tmp_path / "log")
        assert (server.state, server.why) == (ServerState.ENDED, "killed by SIGKILL")


def test_an_orphan_that_was_adopted_beside_a_worker_is_reaped(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import subprocess, sys; "
        'subprocess.Popen(["sleep", "1000"]); sys.stdin.read()\'], stdin=subprocess.PIPE)\n'
        "print('up', flush=True)\n"
        "while not os.path.exists(os.environ['GO']): time.sleep(0.001)\n"
        "child.communicate()\nprint('orphaned', flush=True)\ntime.sleep(1000)"
    )
    with serving(python_command(script, []), "json") as server:
        worker = begun(server, tmp_path / "log", GO=str(tmp_path / "go"))
        with _adopting():
            (tmp_path / "go").touch()
            deadline_s = time.monotonic() + DEADLINE_S
            while "orphaned" not in text_of(tmp_path / "log"):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
        worker.kill()
        assert worker.wait(DEADLINE_S) == -signal.SIGKILL
        os.waitid(os.P_PGID, worker.pid, os.WEXITED | os.WNOWAIT)  # a zombie of this process
        begun(server, tmp_path / "next").kill()
        with pytest.raises(ChildProcessError):
            os.waitid(os.P_PGID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


REFUSED = {
    "absent": ("import no_such_module", "cannot be imported (ModuleNotFoundError: "),
    "exits": ("raise SystemExit(1)", "cannot be imported (SystemExit: 1)"),
    "thread": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(9e9,), name='pump', daemon=True).start()",
        "starts threads (pump), which a fork does not copy",
    ),
    "process": (
        "import subprocess\nchild = subprocess.Popen(['sleep', '1000'])",
        "starts a process, which forked workers would share",
    ),
    "device": (
        "import sys, types\nsys.modules['torch'] = torch = types.ModuleType('torch')\n"
        "torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)",
        "initialises CUDA, which a fork cannot use",
    ),
    "driver": (
        "import os, sys, types\nsys.modules['torch'] = torch = types.ModuleType('torch')\n"
        "pid = os.getpid()\ntorch.cuda = types.SimpleNamespace(\n"
        "    is_initialized=lambda: False, _is_in_bad_fork=lambda: os.getpid() != pid)",
        "asks the CUDA driver for devices, which a fork cannot use",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_module_after_which_nothing_can_be_forked_is_named(name: str, tmp_path: Path) -> None:
    text, reason = REFUSED[name]
    (tmp_path / "wanted.py").write_text(text)
    (tmp_path / "script.py").touch()
    with serving(python_command(tmp_path / "script.py", []), "json", "wanted") as server:
        assert server.state is ServerState.REFUSED
        assert server.module == "wanted"
        assert re.match(re.escape(reason), server.why), server.why


def test_a_server_that_dies_during_an_import_says_so(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos.kill(os.getpid(), 9)")
    (tmp_path / "script.py").touch()
    with serving(python_command(tmp_path / "script.py", []), "deadly") as server:
        assert server.state is ServerState.ENDED
        assert server.why == "killed by SIGKILL during the import of deadly"


def test_workers_and_server_die_with_the_agent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SLEEP)
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import sys, time\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_forked_programs import begun, python_command, serving\n"
        f"with serving(python_command({str(script)!r}, []), 'json') as server:\n"
        f"    child = begun(server, Path({str(tmp_path)!r}) / 'log')\n"
        "    print(child.pid, server.child.pid, flush=True)\n    time.sleep(1000)\n"
    )
    log = tmp_path / "agent.log"
    parent = Child.start([sys.executable, str(agent)], env=os.environ, tied=True, output=log)
    deadline_s = time.monotonic() + DEADLINE_S
    while "up" not in text_of(tmp_path / "log"):
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.01)
    pids = [int(word) for word in log.read_text().split()]
    assert len(pids) == 2
    os.kill(parent.pid, signal.SIGKILL)
    for pid in pids:
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    parent.wait(DEADLINE_S)
