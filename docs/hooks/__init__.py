"""Pages and drawings of the documentation site that the build makes from the code."""
