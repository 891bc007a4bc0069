"""Train a model to prefer some answers to others (direct preference optimization, DPO).

    python -m experiments.dpo --init path/to/folder --pairs pairs.jsonl

This is the command `jaxformer dpo`; --help describes its flags.
"""

from jaxformer.__main__ import main

if __name__ == "__main__":
    main("dpo")
