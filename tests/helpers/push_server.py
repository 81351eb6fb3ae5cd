"""A server of vLLM without an engine: its HTTP interface, and ranks in threads. Their TargetRank is the real one, their model a dictionary.

Which tensors the ranks hold is read from files that `reshard convert --to vllm` has written.
"""

import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from helpers.fixture_places import stored
from reshard.geometry.dtypes import from_safetensors
from reshard.live.target_rank import TargetRank


class PushServer:
    """What a server has, and what it was asked."""

    def __init__(self, folder, config, *, tp, pp=1, dp=1, ep=False, backend="reshard", model="", dtype="bfloat16"):
        self.tp, self.pp, self.dp, self.ep, self.backend, self.model, self.dtype = tp, pp, dp, ep, backend, model, dtype
        self.asked, self.version, self.is_paused, self.is_open = [], "default", False, False
        self.folder, self._goes_on = folder, threading.Event()
        self.refuses, self.ignores, self.hangs = set(), set(), set()
        """Paths that are answered 500 at once; as if they were done; not before `go_on`."""
        self.slow = {}
        """Path -> seconds that it takes."""
        self.barrier, self.votes = threading.Barrier(tp * pp * dp), [False] * (tp * pp * dp)
        self.ranks = [_Rank(self, rank, folder, config) for rank in range(tp * pp * dp)]
        self._targets = [TargetRank(rank, logging.getLogger("stand-in")) for rank in self.ranks]
        self._pool = ThreadPoolExecutor(len(self.ranks))

    def held(self, rank):
        """Name -> bytes of the tensors of a rank."""
        return self.ranks[rank].tensors

    def answer(self, path, question):
        """The status and the document for a request."""
        self.asked.append(path)
        answers = {
            "/server_info": {"vllm_config": self.about()},
            "/get_world_size": {"world_size": len(self.ranks)},
            "/weight_info": {"weight_version": self.version},
            "/is_paused": {"is_paused": self.is_paused},
            "/health": {},
        }
        time.sleep(self.slow.get(path, 0))
        if path in self.hangs:
            self._goes_on.wait(120)
        if path in self.refuses:
            return 500, {"error": f"no {path}"}
        if path in self.ignores:
            return 200, {"message": "done"}
        if path in answers:
            return 200, answers[path]
        try:
            getattr(self, "on" + path.replace("/", "_"))(question)
        except AttributeError:
            return 404, {}
        return 200, {"message": "done"}

    def go_on(self):
        """Answer what hangs."""
        self.hangs.clear()
        self._goes_on.set()

    def about(self):
        sizes = {"tensor_parallel_size": self.tp, "pipeline_parallel_size": self.pp, "data_parallel_size": self.dp}
        return {
            "parallel_config": {**sizes, "prefill_context_parallel_size": 1, "enable_expert_parallel": self.ep},
            "model_config": {"dtype": f"torch.{self.dtype}", "model": self.model},
            "weight_transfer_config": self.backend and {"backend": self.backend},
        }

    def on_pause(self, question):
        self.is_paused = True

    def on_resume(self, question):
        self.is_paused = False

    def on_reset_prefix_cache(self, question):
        pass

    def on_update_weight_version(self, question):
        self.version = question["new_version"]

    def on_init_weight_transfer_engine(self, question):
        self.all("join", question["init_info"])

    def on_start_weight_update(self, question):
        assert not self.is_open
        self.is_open = True
        self.all("start")

    def on_update_weights(self, question):
        assert self.is_open
        self.all("receive")

    def on_finish_weight_update(self, question):
        assert self.is_open
        self.is_open = False
        self.all("finish")

    def on_shutdown_weight_transfer_engine(self, question):
        assert not self.is_open
        self.all("close")

    def all(self, method, *arguments):
        for future in [self._pool.submit(getattr(target, method), *arguments) for target in self._targets]:
            future.result()


class _Rank:
    """What TargetRank asks of an engine."""

    device = "cpu"

    def __init__(self, server, rank, folder, config):
        self.server, self._rank, self._config, self.fails = server, rank, config, False
        self.tp_rank, self.pp_rank = rank % server.tp, rank // server.tp % server.pp
        name = f"pp-{self.pp_rank}-tp-{self.tp_rank}" if server.pp > 1 else f"rank-{self.tp_rank}"
        self.form = stored(folder / f"model-{name}-part-0.safetensors")
        self.tensors = {}

    def rank(self):
        return self._rank

    def described(self):
        server = self.server
        own = {name: each for name, each in self.form.items() if not name.endswith("_scale")}
        degrees = {"tp": server.tp, "pp": server.pp, "ep": server.tp if server.ep else 1, "tp_rank": self.tp_rank, "pp_rank": self.pp_rank}
        return {
            "engine": "vllm 0.32.0",
            "rank": self._rank,
            "degrees": degrees,
            "config": self._config,
            "model": server.model,
            "quantization": None,
            "tensors": [[[name], from_safetensors(dtype, where=name).name, shape] for name, (dtype, shape, _) in own.items()],
            "others": sorted(self.form.keys() - own.keys()),
        }

    def install(self, tensors):
        if self.fails:
            self.fails = False
            raise RuntimeError("no memory to install")
        import torch

        self.tensors = {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}

    def all_agree(self, own):
        server = self.server
        server.votes[self._rank] = own
        server.barrier.wait(60)
        agreed = all(server.votes)
        server.barrier.wait(60)
        return agreed


@contextmanager
def serving(*arguments, **options):
    """A running PushServer, and its address."""
    found = PushServer(*arguments, **options)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers.get("Content-Length", 0))
            self.reply(json.loads(self.rfile.read(length) or b"{}"))

        def do_GET(self):
            self.reply({})

        def reply(self, question):
            status, document = found.answer(self.path.partition("?")[0], question)
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            with suppress(ConnectionError):  # who asked may have gone
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *unused):
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def end():
        """Listen no more. Requests that hang are not answered, and their connections stay."""
        running.shutdown()
        running.socket.close()

    found.end = end
    try:
        yield found, f"http://127.0.0.1:{running.server_address[1]}"
    finally:
        found.go_on()
        running.shutdown()
        running.server_close()
