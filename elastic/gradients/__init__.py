"""One mean gradient per step, exact on request."""
