"""List the programs: python -m experiments."""

from pathlib import Path

from jaxformer.__main__ import program_list


def program_files() -> dict[str, Path]:
    """The files of the programs by their commands."""
    here, files = Path(__file__).parent, dict[str, Path]()
    for path in sorted([*here.glob("*.py"), *here.glob("*/__main__.py")]):
        text = path.read_text(encoding="utf-8")
        if '\nif __name__ == "__main__":' in text and path != here / "__main__.py":
            name = path.stem if path.parent == here else path.parent.name
            files[f"python -m experiments.{name}"] = path
    return files


if __name__ == "__main__":
    print(program_list(program_files()))
