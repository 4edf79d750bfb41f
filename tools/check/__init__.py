"""The check of a training script: small runs under several circumstances, compared."""
