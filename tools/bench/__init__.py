"""The sections of `holdfast bench`: what is timed, beside a physical reference and a peer."""
