"""What runs of scenarios, and histories of any job, come to: a page, JUnit's XML, JSON."""
