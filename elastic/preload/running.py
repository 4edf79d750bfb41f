"""The user's program in a forked process: it finds what it finds when the interpreter starts it."""

from __future__ import annotations

import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final

from holdfast.elastic.preload.program import WorkerProgram

_OWN: Final = str(Path(__file__).parent)


def search_path_entry(program: WorkerProgram) -> str:
    """Return the first entry of ``sys.path`` as the interpreter sets it, links resolved."""
    if program.is_module:
        return os.getcwd()  # noqa: PTH109 - as the interpreter spells it
    if _importer(program.name):
        return os.path.abspath(program.name)  # noqa: PTH100
    return os.path.dirname(os.path.realpath(program.name))  # noqa: PTH120


def run(program: WorkerProgram, *, fresh: Mapping[str, Any], command: Sequence[str]) -> None:
    """Run the program as ``__main__``; ``fresh`` is the namespace of a script at its first line.

    ``command`` is the whole command line. Raises what the program raises.
    """
    sys.argv[:] = ["-m" if program.is_module else program.name, *program.args]
    sys.orig_argv[:] = command
    main = ModuleType("__main__")
    main.__dict__.clear()
    main.__dict__.update(
        {**fresh, "__doc__": None, "__loader__": importlib.machinery.BuiltinImporter}
    )
    sys.modules["__main__"] = main
    try:
        if program.is_module:
            del main.__dict__["__file__"], main.__dict__["__cached__"]
            runpy._run_module_as_main(program.name)  # type: ignore[attr-defined]
        elif _importer(program.name):
            del main.__dict__["__file__"], main.__dict__["__cached__"]
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        else:
            _run_script(program.name, main)
    except SystemExit:
        raise
    except BaseException:
        _hide_own_frames()
        raise


def _run_script(name: str, main: ModuleType) -> None:
    path = name if os.path.isabs(name) else f"{os.getcwd()}/{name}"  # noqa: PTH109, PTH117
    try:
        code = _code(path)
    except OSError as error:
        print(  # noqa: T201 - as the interpreter does
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    main.__dict__["__file__"] = path
    main.__dict__["__loader__"] = importlib.machinery.SourceFileLoader("__main__", path)
    exec(code, main.__dict__)


def _code(path: str) -> CodeType:
    with io.open_code(path) as file:
        compiled: CodeType | None = pkgutil.read_code(file)
    if compiled is not None:
        return compiled
    with io.open_code(path) as file:
        code: CodeType = compile(file.read(), path, "exec", dont_inherit=True)
    return code


def _importer(name: str) -> object | None:
    """Return the importer of a folder or an archive that holds a ``__main__``, None of a script."""
    return pkgutil.get_importer(name)


def _hide_own_frames() -> None:
    """Make the hook of uncaught errors show the traceback that the interpreter would show.

    The error goes on to the interpreter, which does the rest: it calls the hook, and ends the
    process by SIGINT after a ``KeyboardInterrupt``.
    """
    hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = hook
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN):
            trace = trace.tb_next
        error.__traceback__ = sys.last_traceback = trace
        hook(kind, error, trace)

    sys.excepthook = show
