"""What is true of the project as a whole: its folders, its dependencies, its promises in prose."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jaxformer

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOLDERS = {"jaxformer", "experiments", "tests", "notebooks"}
FILES = {
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "CITATION.cff",
}
# What programs and README's commands write; .gitignore names each of them.
PRODUCTS = {"runs", "build", "dist", "__pycache__", "exported", "mine", "my-llama"}
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def relative(path):
    return str(path.relative_to(ROOT))


def requirements(extra=None):
    """What an extra asks for, with the extras it names in their place; None is the core."""
    required = []
    for text in PROJECT["dependencies"] if extra is None else EXTRAS[extra]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            required += [r for name in requirement.extras for r in requirements(name)]
        else:
            required.append(requirement)
    return required


CONSTRAINTS = ["constraints.txt", "constraints-oldest.txt", "constraints-newest.txt"]


def pins(name="constraints.txt"):
    lines = (ROOT / ".ci" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_functional_needs_jax_alone():
    code = "import sys, jaxformer.functional; print(*{name.split('.')[0] for name in sys.modules})"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    imported = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert {"jax", "jaxformer"} <= set(imported)
    packages = {"flax", "orbax", "grain", "tensorstore", "optax", "tokenizers"}
    assert not packages & set(imported)


def test_type_annotations_are_shipped():
    assert (ROOT / "jaxformer" / "py.typed").is_file()
    assert PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["jaxformer"]
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_every_package_folder_is_a_package():
    folders = {path.parent for path in (ROOT / "jaxformer").rglob("*.py")}
    assert not [relative(folder) for folder in folders if not (folder / "__init__.py").is_file()]
    parts = {folder.name for folder in folders if folder.parent == ROOT / "jaxformer"}
    assert parts | {"options"} == set(jaxformer._LAZY_SUBMODULES)  # `jaxformer.NAME` imports it


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_name_extras_that_exist(extra):
    nested = [Requirement(r) for r in EXTRAS[extra] if Requirement(r).name == PROJECT["name"]]
    assert {name for requirement in nested for name in requirement.extras} <= set(EXTRAS)
    assert requirements(extra)


def imports(path):
    """Names of the top-level modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


@pytest.mark.slow
def test_every_import_is_declared():
    declared = {canonicalize_name(r.name) for e in (None, *EXTRAS) for r in requirements(e)}
    # Parts of declared ones: of pytest, of jax, of the variants that chex tests by, of myst-nb.
    declared |= {"packaging", "jaxlib", "ml-dtypes", "absl-py", "pyyaml"}
    distributions = importlib.metadata.packages_distributions()
    undeclared = {
        f"{relative(path)}: {name}"
        for path in SOURCES
        for name in imports(path)
        if name not in sys.stdlib_module_names | FOLDERS
        and not path.with_name(f"{name}.py").exists()  # a file beside it
        and not declared & {canonicalize_name(d) for d in distributions.get(name, [name])}
    }
    assert not undeclared


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_are_exact_versions_and_nothing_else(name):
    lines = (ROOT / ".ci" / name).read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert [line for line in pinned if not re.fullmatch(r"[a-z0-9-]+==\d[\w.]*", line)] == []
    assert pinned == sorted(set(pinned))


@pytest.mark.parametrize("extra", [None, "train", "hub", "plots", "test", "dev"])
def test_constraints_cover_what_is_installed_from_them(extra):
    versions = pins()
    for requirement in requirements(extra):
        version = versions.get(canonicalize_name(requirement.name))
        assert version and version in requirement.specifier, (str(requirement), version)


@pytest.mark.parametrize("name", CONSTRAINTS[1:])
@pytest.mark.parametrize("extra", [None, "train", "hub"])
def test_the_oldest_and_newest_versions_are_declared_to_work(extra, name):
    versions = pins(name)
    for requirement in requirements(extra):
        version = versions.get(canonicalize_name(requirement.name))
        assert version and version in requirement.specifier, (str(requirement), version)


def test_the_oldest_versions_are_the_lower_bounds():
    oldest = pins("constraints-oldest.txt")
    assert (oldest["jax"], oldest["flax"], oldest["numpy"]) == ("0.7.2", "0.11.2", "2.0.2")
    bounds = {r.name: str(r.specifier) for r in requirements(None)}
    assert (bounds["jax"], bounds["flax"], bounds["numpy"]) == (">=0.7.2", ">=0.11", ">=2.0")


@pytest.mark.parametrize(
    "name",
    [
        "pyproject.toml",
        ".pre-commit-config.yaml",
        ".ci/run",
        *(f".ci/{name}" for name in CONSTRAINTS),
    ],
)
def test_nothing_is_fetched_from_an_address(name):
    assert "://" not in (ROOT / name).read_text()


def test_the_release_check_is_an_executable_script():
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    subprocess.run(["bash", "-n", str(run)], check=True)


def test_the_top_holds_nothing_but_the_four_folders_and_the_five_files():
    entries = [p for p in ROOT.iterdir() if not p.name.startswith(".")]
    folders = {p.name for p in entries if p.is_dir()} - PRODUCTS
    assert {name for name in folders if not name.endswith(".egg-info")} <= FOLDERS
    assert {p.name for p in entries if p.is_file()} == FILES


def test_no_file_is_named_utils_or_helpers():
    drawers = {"utils", "util", "common", "misc", "helpers", "helper"}
    names = [path for path in SOURCES if drawers & {path.stem, path.parent.name}]
    assert not [relative(path) for path in names]


@pytest.mark.slow
def test_every_test_file_has_tests_with_different_names():
    for path in TESTS:
        nodes = ast.walk(ast.parse(path.read_text()))
        functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
        tests = [name for name in functions if name.startswith("test_")]
        assert tests, path
        assert len(tests) == len(set(tests)), f"{path}: a test of the same name hides the first"


def test_cases_that_are_not_slow_are_cases(absent_cases):
    assert not absent_cases


def test_the_changelog_knows_the_version():
    version = re.escape(jaxformer.__version__)
    assert re.search(rf"^## \[{version}\] - ", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_the_license_is_the_one_that_is_declared():
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0" and "LICENSE" in PROJECT["license-files"]
    assert re.search(r"Apache License\s+Version 2\.0, January 2004", text)
    assert re.search(r"Copyright \d{4} The jaxformer authors", text)


def test_the_package_says_its_version():
    """Its only home, from which pyproject takes it."""
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "jaxformer/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", jaxformer.__version__)
