"""Many agents, or many ranks, without a job of their own: what their watches and groups cost."""
