"""The format on disk: manifest, packs, codecs, and the Zarr metadata of each tensor."""
