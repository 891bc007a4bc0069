"""A run whose text is on a hub that fails, stalls and cuts connections, and that is killed."""

import json
import signal
import threading
import time

import pytest

from jaxformer.training.metrics import read_json_lines
from tests.data.hub_server import NAME, HubServer
from tests.run.processes import TIMEOUT_SECONDS, start_python

FILES = {
    f"data/{shard}.jsonl": "".join(
        json.dumps({"text": f"{shard}.{i}: the fox jumps over {i * i} lazy dogs"}) + "\n"
        for i in range(30)
    ).encode()
    for shard in range(6)
}
# Each file is a shard, however small.
START = """
import runpy
from jaxformer.data import shard_files
shard_files.MIN_SHARD_BYTES = 1
runpy.run_module("experiments.pretrain", run_name="__main__", alter_sys=True)
"""
FLAGS = [
    *("-c", START, "tiny", "--tokenizer", "ByteLevel()"),
    *("--corpus", f"TextFiles(path='hf://datasets/{NAME}/data')", "--length", "16"),
    *("--model.model-dim", "16", "--model.num-layers", "1", "--model.vocab-size", "257"),
    *("--steps", "120", "--batch-size", "8", "--save-every", "10", "--evaluate-every", "50"),
    *("--log-every", "1", "--sample-tokens", "None", "--no-tensorboard", "--scan"),
    *("--buffer-gb", "0", "--cache", "cache", "--resume-or-begin", "--output"),
]


@pytest.fixture
def hub():
    server = HubServer(FILES)
    yield server
    server.close()


def start(place, hub, output, timeout="1"):
    return start_python(place, *FLAGS, output, HF_ENDPOINT=hub.url, HF_HUB_DOWNLOAD_TIMEOUT=timeout)


def figures(folder):
    """Lines of metrics, without times."""
    lines = read_json_lines(folder / "metrics.jsonl")
    return [
        {k: x for k, x in line.items() if k not in ("time", "tokens_per_second")} for line in lines
    ]


@pytest.mark.slow
def test_killed_beside_a_failing_hub_it_reads_the_same_text(hub, tmp_path):
    whole = start(tmp_path, hub, "whole")
    _, errors = whole.communicate(timeout=TIMEOUT_SECONDS)
    assert whole.returncode == 0, errors
    downloads = hub.num_downloads
    assert downloads > 12  # two epochs and more of six files
    hub.faults = [503, None, "cut", "stall"] * 5
    kills = 0
    for moment in (1, 3, 4, 6, 5, 9, 7, 99):
        process = start(tmp_path, hub, "killed")
        hub.at_download(hub.num_downloads + moment, process.kill)
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        kills += process.returncode == -signal.SIGKILL
        assert process.returncode in (0, -signal.SIGKILL), errors
    assert process.returncode == 0 and kills >= 4
    assert figures(tmp_path / "killed") == figures(tmp_path / "whole")


@pytest.mark.slow
def test_a_signal_is_obeyed_while_a_download_stalls(hub, tmp_path):
    """Saved and ended within seconds, though the hub would answer after a minute."""
    hub.stall_seconds, hub.faults = 60.0, [None, None, None, *["stall"] * 20]
    process, sent_at = start(tmp_path, hub, "stalled", timeout="30"), list[float]()

    def interrupt():
        time.sleep(2)  # by then it waits for this file
        sent_at.append(time.monotonic())
        process.send_signal(signal.SIGTERM)

    hub.at_download(4, lambda: threading.Thread(target=interrupt).start())
    _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    hub.release.set()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert time.monotonic() - sent_at[0] < 15
    step = max(int(p.name) for p in (tmp_path / "stalled/checkpoints").glob("[0-9]*"))
    assert figures(tmp_path / "stalled")[-1]["step"] == step


@pytest.mark.slow
def test_a_hub_that_is_away_ends_the_run_in_one_sentence(hub, tmp_path):
    hub.files = {}
    process = start(tmp_path, hub, "away")
    _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 1 and "Traceback" not in errors
    assert f"hf://datasets/{NAME}/data cannot be reached: " in errors
