"""`holdfast top`: a run in the terminal as it goes, as an application or as plain lines."""
