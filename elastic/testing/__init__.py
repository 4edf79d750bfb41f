"""The simulator of the control plane, and the search for the fewest faults that break a job."""
