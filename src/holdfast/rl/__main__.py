"""The included trainer as a command: ``python -m holdfast.rl --preset quick``."""

from holdfast.adapters.rl.main import leave, main

if __name__ == "__main__":
    leave(main())
