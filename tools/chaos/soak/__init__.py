"""Random faults for hours: memory must stay flat, and no protected step may be lost."""
