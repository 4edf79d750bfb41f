"""The compiled copy, built with sanitizers, stays within its buffers and agrees with plain code."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import holdfast.ckpt.native

SOURCE = Path(holdfast.ckpt.native.__file__).with_name("_stream.c")
DRIVER = Path(__file__).with_name("stream_bounds.c")
COMPILER = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
SANITIZERS = "-fsanitize=address,undefined"


@pytest.fixture(scope="module", params=[(), ("-DCAN_FOLD=0",)], ids=["", "narrow products"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"there is no compiler {COMPILER}")
    place = tmp_path_factory.mktemp("native")
    empty, made = place / "empty.c", place / "stream_bounds"
    empty.write_text("int main(void) { return 0; }\n")
    build = [COMPILER, "-g", "-O1", SANITIZERS, "-fno-sanitize-recover=all", "-o", str(made)]
    if subprocess.run([*build, str(empty)], capture_output=True, check=False).returncode:
        pytest.skip(f"{COMPILER} has no sanitizers")
    subprocess.run([*build, *request.param, str(DRIVER), str(SOURCE)], check=True)
    return made


@pytest.mark.parametrize(
    ("seed", "rounds"), [(7, 20), pytest.param(11, 3000, marks=pytest.mark.exhaustive)]
)
def test_copies_of_any_size_and_alignment_are_whole_and_in_bounds(
    program: Path, seed: int, rounds: int
) -> None:
    done = subprocess.run(
        [program, str(seed), str(rounds)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("ok\n")
