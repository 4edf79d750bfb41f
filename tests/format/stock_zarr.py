"""Open a reference map with zarr-python and fsspec alone, and print a digest of every array.

Usage: stock_zarr.py STEP_DIRECTORY [--moved], or stock_zarr.py ZARR_DIRECTORY --plain, where
Holdfast is not installed.
"""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import fsspec
import zarr

for name in ("ckpt", "elastic", "adapters", "tools", "torch", "ml_dtypes"):
    assert importlib.util.find_spec(name) is None, f"{name} is installed here"

folder = Path(sys.argv[1])
if "--plain" in sys.argv:
    group = zarr.open_group(folder, mode="r")
else:
    refs = json.loads((folder / "refs.json").read_bytes())
    version = json.loads(refs["refs"]["zarr.json"])["attributes"]["holdfast"]["format"]
    root = folder if version == 1 else folder.parent
    files = fsspec.filesystem(
        "reference",
        fo=str(folder / "refs.json"),
        asynchronous=True,
        template_overrides={"root": str(root)} if "--moved" in sys.argv else None,
    )
    group = zarr.open_group(zarr.storage.FsspecStore(files, read_only=True, path=""), mode="r")
found = {}
for name, array in group.arrays():
    data = array[...]
    found[name] = {
        "dtype": str(array.dtype),
        "torch_dtype": array.attrs["torch_dtype"],
        "shape": list(array.shape),
        "sha256": hashlib.sha256(data.tobytes()).hexdigest(),
    }
print(json.dumps({"arrays": found, "values": group.attrs["values"]}))
