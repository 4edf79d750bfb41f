"""Open a reference map with zarr-python and fsspec alone, and print a digest of every array.

Usage: stock_zarr.py STEP_DIRECTORY
"""

import hashlib
import json
import sys

for ours in ("ckpt", "elastic", "adapters", "tools", "torch"):
    sys.modules[ours] = None  # type: ignore[assignment]  # importing it fails

import fsspec  # noqa: E402
import zarr  # noqa: E402

folder = sys.argv[1]
files = fsspec.filesystem(
    "reference",
    fo=f"{folder}/refs.json",
    asynchronous=True,
    template_overrides={"root": folder} if "--moved" in sys.argv else None,
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
