"""The trainers of an RL job: steps, evaluation, and the metrics they report."""
