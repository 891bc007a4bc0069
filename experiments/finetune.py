"""Fine-tune an existing model on your own text or instructions.

    python -m experiments.finetune --init Qwen/Qwen3-0.6B --corpus my.txt

This is the command `jaxformer finetune`; --help describes its flags.
"""

from jaxformer.__main__ import main

if __name__ == "__main__":
    main("finetune")
