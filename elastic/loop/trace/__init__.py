"""A run that records what it computes, for `holdfast check`; imported only for that."""
