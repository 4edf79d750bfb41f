"""`tiny_training` in a worker that fails if it has a client of etcd; it reports its protobuf."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--protobuf", type=Path, required=True)
    args, rest = parser.parse_known_args()
    script = Path(__file__).with_name("tiny_training.py")
    sys.argv = [str(script), *rest]
    runpy.run_path(str(script), run_name="__main__")
    foreign = {"grpc", "aetcd", "etcd3"} & set(sys.modules)
    assert not foreign, f"a trainer has imported {foreign}"
    from google.protobuf.internal import api_implementation

    args.protobuf.write_text(api_implementation.Type())


if __name__ == "__main__":
    main()
