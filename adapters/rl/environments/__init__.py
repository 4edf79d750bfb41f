"""What is asked, and what replies."""
