"""A tiny OpenAI-compatible server over HTTP, to be started as a command: PORT [MS A TOKEN] [PID FILE].

It writes its own process id and that of a child, which ignores SIGTERM, into the file. It names its models by
the variable FAKE_MODELS, fails to start with FAKE_START=broken, and answers 500 to every GET with FAKE_START=slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN_S = float(sys.argv[2]) / 1e3 if len(sys.argv) > 2 else 0.0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if os.environ.get("FAKE_START") == "slow":
            self._answer(b"", 500)
        elif self.path == "/health":
            self._answer(b"{}")
        elif self.path != "/v1/models":
            self._answer(b"", 404)
        else:
            models = os.environ.get("FAKE_MODELS", "fake").split(",")
            self._answer(json.dumps({"data": [{"id": model} for model in models]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        num_tokens = int(body["max_tokens"])
        self.send_response(200)
        self.end_headers()
        for _ in range(num_tokens):
            time.sleep(TOKEN_S)
            self._event({"choices": [{"text": f" {body['model']}", "finish_reason": None}]})
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": num_tokens}
        self._event({"choices": [], "usage": usage})

    def _event(self, event: object) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def main() -> None:
    if os.environ.get("FAKE_START") == "broken":
        sys.exit("no such model: broken")
    if len(sys.argv) > 3:
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", stubborn])
        with Path(sys.argv[3]).open("a") as file:
            file.write(f"{os.getpid()} {child.pid}\n")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
