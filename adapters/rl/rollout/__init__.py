"""The rollout workers: they sample answers and log each token as it comes."""
