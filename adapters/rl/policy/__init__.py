"""The language models that an RL job trains, and how ranks fill and shard their weights."""
