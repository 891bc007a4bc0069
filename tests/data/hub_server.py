"""A local server in place of the Hugging Face hub, whose downloads fail, stall or end early."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

NAME = "someone/texts"
COMMIT = "0" * 40


class QuietServer(ThreadingHTTPServer):
    """A server whose killed clients are no news."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class HubServer:
    """Serves the files of one dataset; `faults` has the fault of each download to come.

    A fault is a status such as 503, or "stall" or "cut"; None is none.
    """

    def __init__(self, files: Mapping[str, bytes]):
        self.files, self.faults = dict(files), list[int | str | None]()
        self.stall_seconds, self.release = 3.0, threading.Event()  # or until it is set
        self.num_downloads, self._at = 0, dict[int, Callable[[], None]]()
        server = QuietServer(("127.0.0.1", 0), self._handler())
        server.daemon_threads = True
        self._server = server
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def at_download(self, number: int, call: Callable[[], None]) -> None:
        """Call a function when a download arrives, by its number."""
        self._at[number] = call

    def download(self) -> int | str | None:
        """Count a download; returns its fault."""
        self.num_downloads += 1
        self._at.pop(self.num_downloads, lambda: None)()
        return self.faults.pop(0) if self.faults else None

    def tree(self, folder: str, *, recursive: bool) -> list[dict[str, object]]:
        """Entries of a folder, as the hub lists them."""
        prefix = f"{folder}/" if folder else ""
        entries = dict[str, dict[str, object]]()
        for path, data in self.files.items():
            if not path.startswith(prefix):
                continue
            below = path.removeprefix(prefix).split("/")
            for depth in range(1, len(below)) if recursive else range(1, min(2, len(below))):
                name = prefix + "/".join(below[:depth])
                entries[name] = {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
            if recursive or len(below) == 1:
                oid = hashlib.sha1(data).hexdigest()
                entries[path] = {"type": "file", "path": path, "size": len(data), "oid": oid}
        return [entries[name] for name in sorted(entries)]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def answer(self, content: object, status: int = 200) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path, query = urlsplit(self.path).path, urlsplit(self.path).query
                if match := re.fullmatch(rf"/api/datasets/{NAME}/tree/\w+/?(.*)", path):
                    entries = hub.tree(match[1], recursive="recursive=true" in query.lower())
                    self.answer(entries or {"error": "not found"}, 200 if entries else 404)
                elif path.startswith(f"/api/datasets/{NAME}"):
                    siblings = [{"rfilename": name} for name in hub.files]
                    self.answer({"id": NAME, "sha": COMMIT, "siblings": siblings})
                elif match := re.fullmatch(rf"/datasets/{NAME}/resolve/\w+/(.*)", path):
                    self.send(match[1])
                else:
                    self.answer({"error": "not found"}, 404)

            def send(self, name: str) -> None:
                fault = hub.download()
                if isinstance(fault, int):
                    return self.answer({"error": "fault"}, fault)
                data = hub.files[name]
                span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                begin, end = (
                    (int(span[1]), int(span[2] or len(data) - 1) + 1) if span else (0, len(data))
                )
                part = data[begin:end]
                self.send_response(206 if span else 200)
                self.send_header("Content-Length", str(len(part)))
                self.send_header(
                    "Content-Range", f"bytes {begin}-{begin + len(part) - 1}/{len(data)}"
                )
                self.end_headers()
                if fault == "stall":
                    self.wfile.write(part[:10])
                    self.wfile.flush()
                    hub.release.wait(hub.stall_seconds)
                elif fault == "cut":
                    self.wfile.write(part[: len(part) // 2])
                    self.close_connection = True
                else:
                    self.wfile.write(part)

        return Handler
