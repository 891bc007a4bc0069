"""Uploads to a local server in place of the Hugging Face hub, which fails, refuses or stalls."""

import base64
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jaxformer.interop import hub

NAME = "someone/model"


class Hub(ThreadingHTTPServer):
    """Keeps the files of each commit; `faults` has the fault of each commit to come."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files, self.faults, self.created = {}, [], []
        self.release = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.answer({"id": NAME, "sha": "0" * 40, "siblings": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            return self.answer({"url": f"{self.server.url}/{NAME}"})
        if self.path == "/api/validate-yaml":  # of the card
            return self.answer({"errors": [], "warnings": []})
        if re.match(rf"/api/models/{NAME}/preupload/", self.path):
            files = [
                {"path": x["path"], "uploadMode": "regular", "shouldIgnore": False}
                for x in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        assert re.match(rf"/api/models/{NAME}/commit/", self.path), self.path
        fault = self.server.faults.pop(0) if self.server.faults else None
        if fault == "stall":
            self.server.release.wait(30)
        elif fault is not None:
            return self.answer({"error": "of the server"}, fault)
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.files[line["value"]["path"]] = content
        self.answer({"commitUrl": f"{self.server.url}/{NAME}/commit/1", "commitOid": "1" * 40})


@pytest.fixture
def server(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    server = Hub()
    api = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api(endpoint=server.url, token="hf_x"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between tries of huggingface_hub
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "README.md").write_text("# A model\n")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 9)
    return tmp_path


@pytest.mark.parametrize("faults", [[], [503], [500, "stall"]], ids=str)
def test_a_folder_arrives_whole_after_faults(faults, server, folder, monkeypatch):
    monkeypatch.setattr(hub, "STALL_SECONDS", 0.5)
    server.faults += faults
    began = time.monotonic()
    assert hub.push_folder(folder, NAME, private=True) == f"{server.url}/{NAME}"
    assert time.monotonic() - began < 15  # a stall lasts 30 seconds
    assert server.files == {x.name: x.read_bytes() for x in folder.iterdir()}
    assert [x["visibility"] for x in server.created] == ["private"]
    assert not server.faults


@pytest.mark.parametrize(
    "faults, reason", [([403], "`hf auth login` logs in"), (6 * [502], "`hf upload someone/")]
)
def test_a_refused_upload_says_what_to_do(faults, reason, server, folder):
    server.faults += faults
    with pytest.raises(ValueError, match=rf"was not uploaded to {NAME}: .*{reason}"):
        hub.push_folder(folder, NAME)
    assert not server.faults and not server.files


def test_without_a_folder_no_repository_is_made(server, folder):
    with pytest.raises(ValueError, match="There is no folder .*absent to upload."):
        hub.push_folder(folder / "absent", NAME)
    assert not server.created


def test_a_name_of_the_hub_has_an_owner(folder):
    with pytest.raises(ValueError, match="A name on the hub is OWNER/NAME; got 'model'."):
        hub.push_folder(folder, "model")
