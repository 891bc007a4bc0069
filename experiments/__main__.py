"""List the programs: python -m experiments."""

from pathlib import Path

from jaxformer.__main__ import program_list

if __name__ == "__main__":
    print(program_list("experiments", Path(__file__).parent))
