"""Export a trained model and its tokenizer as a Hugging Face folder.

    python -m experiments.export --checkpoint runs/pretrain-1 --output exported

This is the command `jaxformer export`; --help describes its flags.
"""

from jaxformer.__main__ import main

if __name__ == "__main__":
    main("export")
