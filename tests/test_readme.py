"""What README, the guides and CONTRIBUTING say is so: code runs, tables are those of the source."""

import json
import os
import re
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import pytest

import jaxformer
from experiments import report
from experiments.benchmark.report import speed_summary
from jaxformer import inspect, zoo
from jaxformer.config import AttentionKind
from jaxformer.training.metrics import read_json_lines
from jaxformer.zoo import printing

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDES = {
    path.stem: path.read_text() for path in sorted((ROOT / "experiments/guides").glob("*.md"))
}
PAGES = "\n".join([README, *GUIDES.values()])
BLOCKS = list(dict.fromkeys(re.findall(r"^```python\n(.*?)^```$", PAGES, re.M | re.S)))


def title(block):
    """The first line that is no import."""
    lines = (line for line in block.splitlines() if line and "import " not in line)
    return next(lines)[:40]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Output of a program that runs each block with its own names, in its own folder."""
    folder = tmp_path_factory.mktemp("readme")
    lines = ["import os, traceback"]
    for i, block in enumerate(BLOCKS):
        os.mkdir(folder / str(i))
        run = f"os.chdir({str(folder / str(i))!r}); exec({block!r}, {{}})"
        failed = f"print('failed {i}:', traceback.format_exc())"
        lines += ["try:", f"    {run}", f"    print('ran {i}')", f"except Exception: {failed}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # they compile more than they run
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return ran.stdout + ran.stderr[-2000:]


def test_what_its_commands_write_is_ignored():
    """And those of the guides, but those elsewhere, in buckets or to be chosen (in capitals)."""
    written = re.findall(r"--output ([a-z][\w./-]*)|save_pretrained\(\"([\w-]+)", PAGES)
    tops = {(first or second).split("/")[0] for first, second in written} - {"gs", "experiments"}
    names = {f"/{top}" if "." in top else f"/{top}/" for top in tops}
    assert len(names) >= 9 and names <= set((ROOT / ".gitignore").read_text().split())


def test_there_are_examples_of_every_feature():
    features = GUIDES["features"].partition("## Feature by feature")[2].partition("\n## ")[0]
    parts = re.split(r"^\*\*", features, flags=re.M)[1:]
    assert len(parts) >= 15
    for part in parts:
        assert part.count("```python") == 1, part[:40]
        assert re.search(r"arXiv:\d{4}\.\d{5}|\d{4}", part.partition("```")[0]), part[:40]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=[title(b) for b in BLOCKS])
def test_examples_run(number, printed):
    assert f"ran {number}\n" in printed, printed.partition(f"failed {number}:")[2][:2000]


def test_the_citation_has_the_version_of_the_package():
    citation = README.partition("## Cite")[2]
    assert f"version = {{{jaxformer.__version__}}}" in citation
    assert "license = {Apache-2.0}" in citation


def test_badges_and_versions_are_those_that_are_declared():
    """By the package, and by the classifiers of Python."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = {
        name: re.match(rf"{name}>=([\d.]+)", line)[1]
        for name in ("jax", "flax")
        for line in declared["dependencies"]
        if line.startswith(f"{name}>=")
    }
    assert f"JAX from {oldest['jax']} and Flax from {oldest['flax']} on are supported" in README
    assert f"/badge/jax-{oldest['jax']}%20to%20" in README
    pythons = [c.rpartition(" ")[2] for c in declared["classifiers"] if "Python :: 3." in c]
    assert f"![Python {pythons[0]} to {pythons[-1]}]" in README
    assert {"jax[cuda12]", "jax[cuda13]", "jax[tpu]"} <= set(re.findall(r"jax\[\w+\]", README))


def test_every_guide_is_linked():
    links = set(re.findall(r"\(experiments/guides/(\w+)\.md", README))
    assert links == set(GUIDES)


def test_the_picture_has_every_floor():
    picture = (ROOT / "experiments" / "guides" / "architecture.svg").read_text()
    for path in (ROOT / "jaxformer").glob("*/__init__.py"):
        assert f">{path.parent.name}</text>" in picture


OPTIONS_DRAWN = {
    "MultiHead": "multi-head, grouped-query, multi-query",
    "SharedKV": "shared key and value",
    "Differential": "differential",
    "Latent": "latent (MLA)",
    "LinearAttention": "linear attention",
    "Decay": "complex decay",
    "SelectiveScan": "selective scan",
    "RGLRU": "RG-LRU",
    "TimeMixing": "WKV",
    "ChannelMixing": "channel mixing",
    "ShortConvolution": "short convolution",
    "Mixer": "custom mixer",
    "HybridHeads": "hybrids of layers or of heads",
    "NoAttention": "",  # nothing to draw
}


def test_the_picture_of_a_model_has_every_kind_of_attention_and_adapters():
    """And sinks, gates and what else a head may have."""
    picture = (ROOT / "experiments" / "guides" / "model.svg").read_text()
    kinds = typing.get_args(AttentionKind)
    assert {kind.__name__ for kind in kinds} == OPTIONS_DRAWN.keys()
    others = ("windows", "block-sparse", "sinks", "output gates", "QK-norm", "LoRA", "experts")
    assert not [words for words in (*OPTIONS_DRAWN.values(), *others) if words not in picture]


def test_the_survey_is_that_of_the_zoo():
    assert printing.survey_markdown() in GUIDES["models"]
    assert printing.mixture_markdown() in GUIDES["models"]


def test_numbers_of_models_are_counted():
    counts = re.findall(
        r"(\d+) rows of the survey.*?(\d+)\s+mixtures.*?, and (\d+)\s+presets", PAGES, re.S
    )
    numbers = tuple(str(len(x)) for x in (zoo.survey(), zoo.mixtures(), zoo.names()))
    assert counts == [numbers, numbers]
    references = list((ROOT / "tests" / "interop" / "golden").glob("*.npz"))
    assert f"the logits of {len(references)} small references" in GUIDES["speed"]
    looked_at = list((ROOT / "tests" / "inspect" / "golden").glob("*.npz"))
    assert f"to 1e-5 for {len(looked_at)} reference models" in GUIDES["inside"]


def test_the_run_that_is_shown_is_the_one_that_is_kept():
    lines = read_json_lines(report.RESULTS / "pretrain-cpu" / "metrics.jsonl")
    match = re.search(r"`Held-out loss: ([\d.]+) bits per byte \(gzip -9: [\d.]+\)\.`", README)
    assert f"{lines[-1]['final_held_out_bits_per_byte']:.3f}" == match[1]
    assert len([line for line in lines if "loss" in line]) >= 60


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_what_pages_say_of_results_is_as_the_report_writes_it(page):
    """`python -m experiments.report` would change nothing; README has the run and the speed."""
    text = page.read_text()
    results = json.loads((report.RESULTS / "benchmark-peers" / "benchmark.json").read_text())
    snippets = {
        "pretrain-cpu": report.run_summary(report.RESULTS / "pretrain-cpu"),
        "benchmark-peers": speed_summary(results),
    }
    assert report.replace_snippets(text, snippets) == text
    if page == ROOT / "README.md":
        assert all(f"<!-- results/{name} -->" in text for name in snippets)


def test_what_pages_say_of_results_is_renewed_between_its_comments():
    text = "x\n<!-- results/a -->\nold\n<!-- end of results/a -->\ny"
    assert report.replace_snippets(text, {"a": "new", "b": "z"}) == text.replace("old", "new")
    with pytest.raises(ValueError, match="results/a --> has no matching <!-- end of results/a -->"):
        report.replace_snippets("<!-- results/a -->\nold", {"a": "new"})


def test_losses_of_studies_are_those_of_their_tables():
    rows = re.findall(r"^\| (\S+) \| (.*?) \| ([\d.]+ ± [\d.]+) \|$", GUIDES["studies"], re.M)
    assert len(rows) >= 15
    for study, choice, loss in rows:
        table = (report.RESULTS / study / "table.md").read_text()
        assert f"| {choice} | {loss} |" in table, (choice, study)


GUIDE_FILES = [f"experiments/guides/{name}.md" for name in GUIDES]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *GUIDE_FILES])
def test_links_and_pictures_lead_somewhere(name):
    text = (ROOT / name).read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    anchors = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert name != "README.md" or len(links) > 20
    for link in links:
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            known = r"arxiv\.org/abs/\d{4}\.\d{5}|img\.shields\.io/\S+|cs336\.stanford\.edu/"
            assert re.fullmatch(f"https://({known})", path)
        elif path:
            assert ((ROOT / name).parent / path).exists(), link
        elif anchor:
            assert anchor in anchors, link


def test_every_call_of_inspect_is_told():
    calls = [n for n in vars(inspect) if n[0].islower() and callable(getattr(inspect, n))]
    missing = {name for name in calls if f"`{name}`" not in GUIDES["inside"]}
    assert missing <= {"unstack_layers", "format_parameters"}


def test_every_notebook_is_listed():
    names = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert names and names == set(re.findall(r"\(notebooks/(\S+\.ipynb)\)", README))


def test_paths_of_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    quoted = re.findall(r"`((?:jaxformer|tests|experiments|notebooks)/[\w./*-]+)`", text)
    assert len(quoted) > 10
    for path in quoted:
        assert list(ROOT.glob(path)), path
