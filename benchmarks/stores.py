"""Throughput of a conversion from a store to a store, against a plain parallel copy of the same bytes with obstore; both on the loopback.

    python benchmarks/stores.py [GIB] [ROUNDS]

Our own S3 server (tests/cloud/s3_server.py) runs in a process of its own. Each round copies and converts in turn; the ratios are of pairs.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from cloud.models import write_hf  # noqa: E402

import reshard  # noqa: E402

RANGE, PART, AT_ONCE = 16 << 20, 8 << 20, 16


def copy(store, names, prefix):
    """Copy objects as fast as obstore can: each in its own thread, read in ranges, uploaded in parts."""
    import obstore

    def one(name):
        size = obstore.head(store, f"hf/{name}")["size"]
        with obstore.open_writer(store, f"{prefix}/{name}", buffer_size=PART, max_concurrency=8) as writer:
            for start in range(0, size, RANGE):
                writer.write(obstore.get_range(store, f"hf/{name}", start=start, end=min(start + RANGE, size)))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, names))


def processor():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(work):
    began, used = time.monotonic(), processor()
    work()
    return time.monotonic() - began, processor() - used


def main(gib: float, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        layers = max(1, round(gib * 8))
        source = write_hf(root / "hf", layers=layers, hidden=2048, feed_forward=8192 - 2048, vocabulary=8192)
        server = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "cloud" / "s3_server.py"), str(root / "server")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            os.environ |= {"AWS_ENDPOINT_URL": server.stdout.readline().strip(), "AWS_REGION": "us-east-1"}
            os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
            import obstore
            from obstore.store import from_url

            store = from_url("s3://bucket", endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True})
            for path in source.iterdir():
                obstore.put(store, f"hf/{path.name}", path)
            names = [path.name for path in source.glob("*.safetensors")]
            nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
            for number in range(rounds):
                copied, copied_cpu = measured(lambda number=number: copy(store, names, f"copy-{number}"))
                plan = reshard.plan(reshard.open("s3://bucket/hf"), to="vllm", tp=8)
                converted, cpu = measured(lambda number=number, plan=plan: reshard.convert(plan, f"s3://bucket/tp8-{number}"))
                print(
                    f"{nbytes / 1e9:.2f} GB: copy {nbytes / copied / 1e6:.0f} MB/s ({copied_cpu:.1f} s of processor), "
                    f"convert {nbytes / converted / 1e6:.0f} MB/s ({cpu:.1f} s), ratio {copied / converted:.2f}", flush=True,
                )  # fmt: skip
                for prefix in (f"copy-{number}", f"tp8-{number}"):
                    paths = [each["path"] for page in obstore.list(store, prefix) for each in page]
                    obstore.delete(store, paths)
        finally:
            server.stdin.close()
            server.wait()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0, int(sys.argv[2]) if len(sys.argv) > 2 else 3)
