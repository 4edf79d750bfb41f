"""Reports of runs and histories: a page, JUnit XML, JSON."""
