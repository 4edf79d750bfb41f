"""torchrun's rendezvous on Holdfast's coordinator."""
