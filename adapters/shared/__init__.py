"""Parts of several adapters: agreed buffers, random generators, removal of old steps."""
