"""The wheel and the sdist hold one package, the same by every way of building it."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from packages import build, clone

FOLDERS = ("adapters", "ckpt", "elastic", "tools")
COMPILED = ("holdfast/ckpt/native/_stream.so", "holdfast/elastic/gradients/native/_grid.so")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone(tmp_path_factory.mktemp("source") / "checkout")


@pytest.fixture(scope="module")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel and an sdist of a fresh clone."""
    wheel, sdist = build(checkout, tmp_path_factory.mktemp("dist"), "wheel", "sdist")
    return wheel, sdist


def files_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def files(built: tuple[Path, Path]) -> dict[str, bytes]:
    return files_of(built[0])


def test_the_wheel_of_the_sdist_is_that_of_the_checkout(
    built: tuple[Path, Path], files: dict[str, bytes], tmp_path: Path
) -> None:
    wheel, sdist = built
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert not [*source.rglob("*.so")], "it is compiled where it is installed"
    (again,) = build(source, tmp_path / "dist", "wheel")
    assert again.name == wheel.name
    found = files_of(again)
    assert found.keys() == files.keys()
    assert [name for name in files if found[name] != files[name]] == []


def test_the_wheel_holds_one_package_and_what_describes_it(files: dict[str, bytes]) -> None:
    tops = {PurePosixPath(name).parts[0] for name in files}
    assert {top.partition("-")[0] for top in tops} == {"holdfast"}
    assert [top for top in tops if "-" in top] == [
        next(top for top in tops if top.endswith(".dist-info"))
    ]


def test_every_file_of_the_four_folders_is_in_the_wheel(
    checkout: Path, files: dict[str, bytes]
) -> None:
    wanted = {
        f"holdfast/{path.relative_to(checkout)}"
        for folder in FOLDERS
        for path in checkout.joinpath(folder).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    assert wanted - files.keys() == set()
    assert {*COMPILED, "holdfast/py.typed", "holdfast/__init__.pyi"} <= files.keys()


def test_the_sdist_holds_each_folder_once_and_what_its_tests_need(
    built: tuple[Path, Path],
) -> None:
    with tarfile.open(built[1]) as archive:
        names = {PurePosixPath(*PurePosixPath(name).parts[1:]) for name in archive.getnames()}
        links = [member.name for member in archive if member.issym() or member.islnk()]
    tops = {name.parts[0] for name in names}
    assert tops & set(FOLDERS) == set(), "the folders are below src/holdfast"
    assert {name.parts[2] for name in names if name.parts[:2] == ("src", "holdfast")} >= set(
        FOLDERS
    )
    assert links == [], "an archive with links could not be unpacked everywhere"
    assert {"tests", "docs", "Makefile", "constraints.txt", "pyproject.toml", "LICENSE"} <= tops
