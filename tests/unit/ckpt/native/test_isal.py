"""ISA-L comes from the wheel, or from the system with a warning; an unsupported one is refused."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.ckpt.native import isal

SUM = 0xE3069283
"""The CRC32C of ``123456789``, as RFC 3720 has it."""

FUNCTIONS = (
    *("crc32_iscsi", "crc64_rocksoft_refl", "ec_init_tables", "ec_encode_data"),
    *("ec_encode_data_update", "gf_gen_cauchy1_matrix", "gf_invert_matrix"),
)


@pytest.fixture(autouse=True)
def loaded_anew() -> Iterator[None]:
    isal.library.cache_clear()
    yield
    isal.library.cache_clear()


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[[str, int], str]:
    """Compile a library that names itself a version of ISA-L, and lacks one function."""

    def compile_it(lacks: str, version: int) -> str:
        source, target = tmp_path / "fake.c", tmp_path / f"libfake-{lacks}-{version:x}.so"
        bodies = [f"void {name}(void) {{}}" for name in FUNCTIONS if name != lacks]
        source.write_text(
            f"unsigned isal_get_version(void) {{ return {version}; }}" + "".join(bodies)
        )
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        subprocess.run([compiler, "-shared", "-fPIC", "-o", target, source], check=True)
        return str(target)

    return compile_it


def wheels_own() -> str:
    spec = importlib.util.find_spec("pyeclib")
    assert spec and spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]).parent / isal.IN_WHEEL)


def candidates(monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    monkeypatch.setattr(isal, "_candidates", lambda: iter(paths))


def test_the_wheels_library_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert isal.library()._name == wheels_own()
    assert isal.crc32c(b"123456789") == SUM
    assert caplog.records == []


def test_where_the_wheel_has_none_the_systems_is_taken_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    system = tmp_path / "libisal.so.2"
    system.symlink_to(wheels_own())
    monkeypatch.setattr(isal, "IN_WHEEL", "pyeclib.libs/libisal-other.so")
    monkeypatch.setattr(isal, "IN_SYSTEM", str(system))
    with caplog.at_level(logging.WARNING):
        assert isal.crc32c(b"123456789") == SUM
    (record,) = caplog.records
    assert f"ISA-L is taken from {system}: " in record.getMessage()
    assert "libisal-other.so: cannot open shared object file" in record.getMessage()


@pytest.mark.parametrize(
    ("lacks", "version", "said"),
    [
        ("", 0x021E00, "has the version 2.30.0"),
        ("", 0x030000, "has the version 3.0.0"),
        ("crc64_rocksoft_refl", 0x022000, "undefined symbol: crc64_rocksoft_refl"),
        ("ec_encode_data", 0x022000, "undefined symbol: ec_encode_data"),
    ],
)
def test_a_library_that_is_not_relied_on_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiled: Callable[[str, int], str],
    lacks: str,
    version: int,
    said: str,
) -> None:
    candidates(monkeypatch, compiled(lacks, version), wheels_own())
    with caplog.at_level(logging.WARNING):
        assert isal.library()._name == wheels_own()
    assert said in caplog.text


def test_without_any_the_error_names_each_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, compiled: Callable[[str, int], str]
) -> None:
    candidates(monkeypatch, "libnone.so.2", compiled("", 0x021E00))
    with pytest.raises(
        OSError, match=r"2\.31\.0 or newer.*libnone.*2\.30\.0.*pyeclib 1\.8"
    ) as info:
        isal.library()
    assert "libisal2" in str(info.value)
