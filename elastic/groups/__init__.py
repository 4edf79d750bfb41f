"""Process groups and meshes of one generation, interruptible."""
