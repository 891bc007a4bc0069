"""List the programs: python -m jaxformer, or in a clone python -m experiments."""

import ast
from pathlib import Path


def program_list(package: str, folder: Path) -> str:
    """A line for each program of a package: its command, and the first line of its docstring."""
    lines = []
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/__main__.py")]):
        text = path.read_text(encoding="utf-8")
        if '\nif __name__ == "__main__":' in text and path != folder / "__main__.py":
            name = path.stem if path.parent == folder else path.parent.name
            summary = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
            lines.append(f"python -m {package}.{name:<15} {summary}")
    return "\n".join([*lines, "--help after a command describes its flags."])


if __name__ == "__main__":
    print(program_list("jaxformer", Path(__file__).parent))
    print("Programs that train, evaluate and export are in a clone: python -m experiments.")
