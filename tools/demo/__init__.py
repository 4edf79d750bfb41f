"""`holdfast demo`: run a job under repeated kills and judge its result."""
