"""Estimate memory and time of a training step, without a device.

    python -m experiments.plan llama-3-70b

This is the command `jaxformer plan`; --help describes its flags.
"""

from jaxformer.__main__ import main

if __name__ == "__main__":
    main("plan")
