"""The register of a step of many writers: one sorted file, of which a rank reads its own part."""
