"""Generate text with a trained model, streamed to the terminal.

    python -m experiments.generate --checkpoint runs/pretrain-1 --prompt "def main("
    python -m experiments.generate --checkpoint path/to/folder --chat

This is the command `jaxformer generate`; --help describes its flags.
"""

from jaxformer.__main__ import main

if __name__ == "__main__":
    main("generate")
