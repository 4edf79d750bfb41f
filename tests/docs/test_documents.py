"""The claims of the documents hold: links resolve, commands parse, code runs."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from document_blocks import blocks, run_script
from hooks import api, packages
from hooks import commands as command_pages
from hooks.errors_page import errors_page
from hooks.events_page import events_page

from holdfast import ckpt
from holdfast.ckpt.native.crc import BLOCK_BYTES
from holdfast.tools import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


GENERATED = {
    (ROOT / "docs" / page).resolve()
    for page in (
        *api.pages(),
        *command_pages.pages(),
        "reference/events.md",
        "reference/errors.md",
        *packages.pages(ROOT),
    )
}
"""The pages that the build of the site makes from the code."""


def commands() -> list[str]:
    """Every `holdfast …` line of a console block, comments and output left out."""
    lines = [line for d in DOCUMENTS for body in blocks(d, "console") for line in body.splitlines()]
    inputs = [line.removeprefix("$ ").split(" #")[0].strip() for line in lines if line[:2] == "$ "]
    return sorted({line for line in inputs if line.startswith("holdfast ")})


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", document.read_text()):
        found = (document.parent / target).resolve()
        if "://" not in target and found not in GENERATED:
            assert found.exists(), target


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command: str) -> None:
    words = shlex.split(command)[1:]
    args = cli.build_parser(words[0], cli.load(words[0])).parse_args(words)
    assert args.command == words[0]


def test_the_readme_has_exactly_two_set_up_commands() -> None:
    first = blocks(ROOT / "README.md", "console")[0]
    assert first.splitlines() == ["$ make demo", "$ make test"]


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"(?:`|\$ )make ([a-z]+)", document.read_text()))
        assert named <= targets, document


def test_the_decorator_of_the_readme_is_accepted() -> None:
    source = blocks(ROOT / "README.md", "python")[0]
    space: dict[str, object] = {}
    exec(compile(source, "README.md", "exec"), space)
    assert callable(space["train"])


def test_the_checkpoint_calls_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(3, 20)})
    optimizer = torch.optim.AdamW(model.parameters())
    source = blocks(ROOT / "README.md", "python")[1]
    exec(compile(source, "README.md", "exec"), {"model": model, "optimizer": optimizer})
    assert ckpt.open("runs/demo")["model.head.weight"][:10].shape == (10, 3)


def test_the_first_job_of_the_quickstart_runs_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    run_script(tmp_path, blocks(ROOT / "docs" / "tutorials" / "first-job.md", "python")[0])
    assert ckpt.open(tmp_path / "runs" / "first").step == 200


def test_every_public_name_of_a_document_exists() -> None:
    for document in DOCUMENTS:
        for home, name in re.findall(
            r"\bholdfast\.(elastic\.|ckpt\.|)([A-Za-z]\w*)\(", document.read_text()
        ):
            module = importlib.import_module(f"holdfast.{home}".rstrip("."))
            assert hasattr(module, name), (document, name)


DOTTED = re.compile(r"(?<![\w/.-])holdfast((?:\.[A-Za-z_]\w*)+)")
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
MADE = {"the page of events": events_page(), "the page of errors": errors_page()}
FILES = {"holdfast.toml"}
WORDS = {
    *("holdfast.adapters.vllm.worker.HoldfastWorker", "holdfast.adapters.vllm.noise"),
    "holdfast.tools.vllm.loop",
}
"""Words of commands: by them vLLM finds its parts of Holdfast, and `holdfast run` a loop."""


def private(text: str) -> set[str]:
    """Return the dotted names of a text that no public module has."""
    found = {f"holdfast{rest}" for rest in DOTTED.findall(text)}
    return {name for name in found - FILES - WORDS if not is_public(name)}


def is_public(name: str) -> bool:
    """Return whether a dotted name is a public module, a name of one, or an attribute of that."""
    home = max((face for face in api.FACES if f"{name}.".startswith(f"{face}.")), key=len)
    rest = name.removeprefix(home).split(".")[1:]
    if not rest:
        return True
    found: object = importlib.import_module(home)
    names = set(api.names_of(home))
    for part in rest:
        if part not in names:
            return False
        found = getattr(found, part)
        names = set(dir(found))
    return True


@pytest.mark.parametrize("page", [*DOCUMENTS, *EXAMPLES], ids=lambda path: path.name)
def test_every_dotted_name_of_a_document_is_public(page: Path) -> None:
    assert private(page.read_text()) == set()


@pytest.mark.parametrize("page", MADE)
def test_every_dotted_name_of_a_generated_page_is_public(page: str) -> None:
    assert private(MADE[page]) == set()


def test_every_dotted_name_of_a_public_docstring_is_public() -> None:
    found = {}
    for face in api.FACES:
        module = importlib.import_module(face)
        for name in api.names_of(face):
            for member, text in docstrings(name, getattr(module, name)):
                if odd := private(text):
                    found[f"{face}.{member}"] = odd
    assert found == {}


def docstrings(name: str, found: object) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a public name and, of a class, those of its public members."""
    yield name, inspect.getdoc(found) or ""
    if inspect.isclass(found):
        for member in vars(found):
            if not member.startswith("_"):
                yield f"{name}.{member}", inspect.getdoc(getattr(found, member)) or ""


def test_a_private_name_is_found() -> None:
    text = (
        "`holdfast.ckpt.save`, holdfast.ckpt.store.places; holdfast.Run.step, holdfast.Run.stride"
    )
    assert private(text) == {"holdfast.ckpt.store.places", "holdfast.Run.stride"}


def imported(source: str) -> set[str]:
    """Return the modules of Holdfast that a program imports, or imports names from."""
    found = re.findall(r"^\s*(?:from|import) (holdfast[\w.]*)", source, re.MULTILINE)
    return {each for each in found if not each.startswith("holdfast_")}


@pytest.mark.parametrize("page", [*DOCUMENTS, *EXAMPLES], ids=lambda path: path.name)
def test_documents_and_examples_import_public_modules_only(page: Path) -> None:
    programs = [page.read_text()] if page.suffix == ".py" else blocks(page, "python")
    for program in programs:
        assert imported(program) <= set(api.FACES), page


def test_the_guide_to_checkpoints_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source in blocks(ROOT / "docs" / "how-to" / "checkpoints.md", "python"):
        exec(compile(source, "checkpoints.md", "exec"), {})
    assert ckpt.open("runs/adapter").step == 2


def test_the_settings_of_the_guide_to_snapshots_train_and_fence(tmp_path: Path) -> None:
    said = run_script(tmp_path, blocks(ROOT / "docs" / "how-to" / "snapshots.md", "python")[0])
    assert re.fullmatch(r"step \d+, [\d.]+ s old, 0 discarded\n", said)


def test_the_guide_to_snapshots_tracks_arrays_progress_and_a_game_of_each_rank(
    tmp_path: Path,
) -> None:
    source = blocks(ROOT / "docs" / "how-to" / "snapshots.md", "python")[1]
    assert "PerRank(game)" in source
    assert run_script(tmp_path, source) == ""


def test_the_memory_table_of_the_guide_to_snapshots_is_what_is_needed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    guide = ROOT / "docs" / "how-to" / "snapshots.md"
    exec(compile(blocks(guide, "python")[2], "snapshots.md", "exec"), {})
    assert capsys.readouterr().out == blocks(guide, "text")[0]


def test_the_format_names_the_block_that_is_used() -> None:
    assert f"{BLOCK_BYTES:,} bytes" in (ROOT / "docs" / "reference" / "format.md").read_text()
