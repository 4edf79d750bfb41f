"""Generators of documentation pages and drawings from the code, for the site's build."""
