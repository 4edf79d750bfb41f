"""Process groups and meshes of one generation, whose waits can be interrupted."""
