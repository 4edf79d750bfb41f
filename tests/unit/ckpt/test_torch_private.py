"""Torch's private names are used in one module only, which explains each of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tree import ROOT

from holdfast.ckpt import torch_private

PACKAGE = ROOT / "src" / "holdfast"
THE_MODULE = PACKAGE / "ckpt" / "torch_private.py"
OF_OTHERS = (
    PACKAGE / "adapters" / "hf",
    PACKAGE / "adapters" / "torchtitan",
    PACKAGE / "adapters" / "lightning" / "fitting",
    PACKAGE / "adapters" / "vllm",
)
"""Subclasses of transformers' Trainer, torchtitan's manager and Lightning's loops; methods private
to these, and vLLM's record of a request."""


OTHERS = {
    "os": {"_exit"},
    "runpy": {"_run_module_as_main"},
    "subprocess": {"_args_from_interpreter_flags"},
    "sys": {"_getframe"},
    # A parser has no public names for the list of its options, and for the text of their help.
    "argparse": {
        *("_ActionsContainer", "_actions", "_AppendAction", "_SubParsersAction"),
        *("_mutually_exclusive_groups", "_group_actions", "_get_formatter", "_expand_help"),
    },
    "collections": {"_replace"},
    "ctypes": {"_obj"},
    "multiprocessing": {"_fds", "_forkserver", "_inherited_fds", "_inheriting", "_main"},
    "zmq": {"_shadow"},
    "dlrover": {"_engine", "_shm_handler"},
    "torchft": {"_fragments", "_quorum_id"},
    # An Accelerator keeps what it has prepared in lists that have no public names.
    "accelerate": {
        *("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects"),
        *("_save_model_state_pre_hook", "_load_model_state_pre_hook"),
    },
    # The fork server looks at torch only if a module of the user's has imported it.
    "torch before the loop is imported": {"_is_in_bad_fork"},
    "holdfast": {"_close", "_finish", "_immortal", "_watching"},
}
"""Private names of other packages than torch, and what Holdfast puts on objects of others."""

BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}


def is_private(name: str) -> bool:
    """Say whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


def named(tree: ast.AST) -> set[str]:
    """Return every name that a module gives to something: its own private names are among them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=slots)):
                found |= {str(slot.value) for slot in slots if isinstance(slot, ast.Constant)}
    return found


def foreign(tree: ast.AST, *, ours: frozenset[str]) -> Iterator[str]:
    """Yield what a module uses of the private names of others; ``ours`` are those of the product.

    An object's own (``self._x``) may be defined in any module of the product, what is used of
    another object only in the module itself.
    """
    here = named(tree)
    known = frozenset().union(*OTHERS.values())
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for each in names:
                    if each.name.startswith("torch.") and "._" in each.name:
                        yield f"{node.lineno}: import {each.name}"
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] == "torch":
                    for each in names:
                        if any(is_private(part) for part in (*module.split("."), each.name)):
                            yield f"{node.lineno}: from {module} import {each.name}"
            case ast.Attribute(attr=name, value=value) if is_private(name) and name not in known:
                is_own = isinstance(value, ast.Name) and value.id in ("self", "cls")
                if name not in (ours if is_own else here):
                    yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Call(func=ast.Name(id=called), args=args) if called in BY_NAME:
                for each in args:
                    name = each.value if isinstance(each, ast.Constant) else ""
                    if isinstance(name, str) and is_private(name) and name not in here | known:
                        yield f"{node.lineno}: {ast.unparse(node)}"


def modules() -> list[Path]:
    """Return the modules of the product."""
    folders = [PACKAGE, *(link.resolve() for link in PACKAGE.iterdir() if link.is_dir())]
    found = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    assert THE_MODULE.resolve() in found
    return [
        path
        for path in found
        if path != THE_MODULE.resolve()
        and not any(path.is_relative_to(folder.resolve()) for folder in OF_OTHERS)
    ]


def test_only_one_module_uses_private_names_of_torch() -> None:
    trees = {path: ast.parse(path.read_text()) for path in modules()}
    ours = frozenset().union(*map(named, trees.values()))
    found = [f"{path}:{use}" for path, tree in trees.items() for use in foreign(tree, ours=ours)]
    assert not found, "put these behind functions of holdfast.ckpt.torch_private:\n" + "\n".join(
        found
    )


@pytest.mark.parametrize(
    "line",
    [
        "from torch._C._distributed_c10d import Store",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch._dynamo",
        "torch._foreach_add_(x, 0.0)",
        "tensor._version",
        "schedule._stages",
        "hasattr(flat, '_local_shard')",
        "attrgetter('_buffers')",
        "class Stage(PipelineStage):\n    def meta(self):\n        return self._stage_meta",
        "class Group(ProcessGroup):\n    def name(self):\n        return super()._name()",
    ],
)
def test_every_way_to_a_private_name_is_seen(line: str) -> None:
    assert list(foreign(ast.parse(line), ours=frozenset())), line


def test_a_group_written_in_python_serves_every_device_itself() -> None:
    group = torch_private.PythonGroup(0, 1)
    assert group._get_backend(torch.device("cpu")) is group  # as torch 2.14 asks before it sends
