"""The report of a run from its events: recoveries by phase, goodput, curves, and a page."""
