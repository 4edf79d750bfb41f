"""Random faults for hours: memory stays flat, and nothing that was protected is lost."""
