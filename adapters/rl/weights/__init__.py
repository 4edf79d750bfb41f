"""The weights of a policy: made at the start, published by trainers, pulled by rollouts."""
