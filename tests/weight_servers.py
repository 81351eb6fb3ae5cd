"""A server that answers as told, on this machine, and answers like those of vLLM's weight checker."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from places import HF

import reshard as library


@contextmanager
def server(answers):
    """A server that answers paths with (status, body, headers), and remembers what it was asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        def do_GET(self):
            asked.append((self.command, self.path))
            status, body, headers = answers.get(self.path.partition("?")[0], (404, b"{}", {}))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *unused):
            pass

    asked = []
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}", asked
    finally:
        running.shutdown()
        running.server_close()


def held(model, dp=1, **options):
    """What vLLM's ranks hold of a model, by key."""
    one = library.digests(HF / model, to="vllm", **options)
    return {key.replace("dp0", f"dp{replica}", 1): digest for key, digest in one.items() for replica in range(dp)}


def vllm(digests, *, expert_parallel=False, dtype="torch.bfloat16", **more):
    config = {"vllm_config": {"parallel_config": {"enable_expert_parallel": expert_parallel}, "model_config": {"dtype": dtype}}}
    return {
        "/weight_checker": (200, json.dumps({"checksums": digests}).encode(), {}),
        "/server_info": (200, json.dumps(config).encode(), {}),
        **more,
    }
