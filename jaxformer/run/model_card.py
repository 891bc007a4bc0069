"""Model card of an exported run, or of its adapters: training data, settings and results."""

from pathlib import Path
from typing import Any

import jax

import jaxformer
from jaxformer.config import Decoder
from jaxformer.json_files import read_json
from jaxformer.layers.lora import split_parameters
from jaxformer.run.loading import LoadedModel
from jaxformer.run.output_folder import RUN_FILE
from jaxformer.training.metrics import read_json_lines
from jaxformer.training.progress import format_count

CARD_FILE = "README.md"
CARD_TEMPLATE = """---
{facts}
---

# {name}

{what} of {count} parameters, trained with jaxformer {version}, {origin}.

| | |
|---|---|
{table}

```python
from {library} import {kind}
from transformers import AutoTokenizer

model = {kind}.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""


def model_card(model: LoadedModel, what: str, name: str) -> str:
    """Model card (README.md) of an exported run.

    Args:
        model: The exported model.
        what: What it is, such as "A qwen3".
        name: Name of the exported model.

    Returns:
        Markdown with the metadata of the Hugging Face hub at its top.
    """
    run = read_json(model.folder / RUN_FILE)
    init, decoder = run["init"], isinstance(model.config.topology, Decoder)
    params, adapter = model.params, model.config.adapter
    library = "transformers" if adapter is None else "peft"
    facts = {"library_name": library, "tags": "[jaxformer]"}
    if decoder:
        facts["pipeline_tag"] = "text-generation"
    origin = init if adapter is None else model.base
    if origin is not None and not Path(origin).exists():
        facts["base_model"] = origin
    if adapter is not None:
        params = split_parameters(adapter, params).trained
    table = training_facts(run) | evaluation_facts(model.folder, model.step or 0)
    return CARD_TEMPLATE.format(
        facts="\n".join(f"{key}: {value}" for key, value in facts.items()),
        name=name,
        what=what,
        count=format_count(sum(x.size for x in jax.tree.leaves(params))),
        version=jaxformer.__version__,
        origin="from scratch" if origin is None else f"from the weights of {origin}",
        table="\n".join(f"| {key} | {value} |" for key, value in table.items()),
        library=library,
        kind=f"Auto{'Peft' * (library == 'peft')}ModelFor{'CausalLM' if decoder else 'Seq2SeqLM'}",
    )


def training_facts(run: dict[str, Any]) -> dict[str, Any]:
    """Training facts of the card, from the saved run.json."""
    optimizer, facts = run["optimizer"], dict[str, Any]()
    if "corpus" in run:
        sources = run["corpus"].get("parts", [run["corpus"]])
        facts["text"] = ", ".join(source.get("path", source["type"]) for source in sources)
    facts["batch size"] = run["batch_size"]
    if "length" in run:
        facts["sequence length"] = run["length"]
    facts["optimizer"] = optimizer["optimizer"]["type"]
    facts["peak learning rate"] = optimizer["schedule"]["peak"]
    return facts


def evaluation_facts(folder: Path, step: int) -> dict[str, Any]:
    """Metrics of the last evaluation at or before a checkpoint, for the card."""
    lines = [x for x in read_json_lines(folder / "metrics.jsonl") if x["step"] <= step]
    facts: dict[str, Any] = {"steps": step}
    for line in reversed(lines):
        numbers = {name: x for name, x in line.items() if name not in ("step", "time")}
        if "loss" not in numbers:  # training metrics have one
            facts["evaluated at step"] = line["step"]
            return facts | {name.replace("_", " "): f"{x:.4g}" for name, x in numbers.items()}
    return facts
