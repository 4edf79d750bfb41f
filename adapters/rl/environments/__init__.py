"""The environments of RL: they give out prompts, reply to the policy, and score its answers."""
