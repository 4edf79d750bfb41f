"""The state of a job: live modules and optimizers become named boxes, and are filled from them."""
