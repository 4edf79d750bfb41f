"""What lies on disk: manifest, packs, codecs, Zarr metadata."""
