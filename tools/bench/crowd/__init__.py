"""Many agents without processes of their own, on a real coordinator: what its watches deliver."""
