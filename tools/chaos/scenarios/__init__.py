"""What a scenario is, the faults there are, the ready ones."""
