"""Parts of several adapters: buffers that ranks agree on, and the global random generators."""
