"""The rollout server on rank 0: gives out prompts, takes samples, salvages those of the dead."""
