"""A node's control process: it holds the lease, runs the workers and the sidecar, and fences."""
