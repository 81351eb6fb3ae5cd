"""The slow check: the search of the built site, in real headless Chromium, leads to the page that answers a question.

    make docs && python tests/pictures/search.py

Needs what check.py needs. The site is served on the loopback: browsers read no index of a search from a file. Nothing here knows how the
search ranks pages; docs/scorer.js and KEYWORDS in docs/conf.py decide it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from check import PICTURES, ROOT
from helpers.framework_environments import run_checks

SITE = ROOT / "docs" / "_build"
# What people type, and the page that they look for; of several pages, any.
QUESTIONS = {
    "merge lora": "recipes/adapters",
    "vllm": "recipes/serving",
    "resume on more gpus": "recipes/torch-load recipes/optimizer-state",
    "deepspeed": "recipes/deepspeed",
    "megatron to hugging face": "recipes/megatron",
    "merge rank files": "recipes/merge-ranks",
    "fsdp to hf": "recipes/hf recipes/merge-ranks",
    "fp8": "recipes/fp8",
    "awq": "recipes/packed",
    "which tp fits": "recipes/degrees",
    "training memory": "recipes/training-memory",
    "compare two checkpoints": "recipes/compare",
    "nan in weights": "recipes/doctor",
    "s3": "recipes/stores",
    "live update": "recipes/live",
    "push weights into a server": "recipes/push",
    "verl": "recipes/verl",
    "unknown model": "recipes/undeclared-model",
    "average checkpoints": "recipes/averaging",
    "resume interrupted conversion": "recipes/interrupted",
    "slurm": "recipes/many-machines",
    "exit code": "reference/exit-codes",
    "json output": "reference/json",
    "python api": "reference/python",
    "which formats are supported": "formats/index",
}
BROWSE = """
import json, sys, time
from urllib.parse import quote
from selenium import webdriver
from selenium.webdriver.common.by import By
options = webdriver.ChromeOptions()
for word in ("--headless=new", "--no-sandbox", "--disable-gpu"):
    options.add_argument(word)
driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
try:
    for question in json.loads(sys.argv[2]):
        driver.get(f"{sys.argv[1]}/search.html?q={quote(question)}")
        links, end = [], time.monotonic() + 20
        while not links and time.monotonic() < end:
            time.sleep(0.05)
            links = driver.find_elements(By.CSS_SELECTOR, "#search-results ul.search li a")
        print(json.dumps([question, links[0].get_attribute("href") if links else None]), flush=True)
finally:
    driver.quit()
"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        """Nothing."""


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    done = subprocess.run([python, "-c", BROWSE, address, json.dumps([*QUESTIONS])], capture_output=True, text=True)
    server.shutdown()
    first = dict(json.loads(line) for line in done.stdout.splitlines())
    for question, pages in QUESTIONS.items():
        page = (first.get(question) or "").removeprefix(f"{address}/").partition(".html")[0]
        yield f"{question!r} leads to {pages.split()[0]}", page in pages.split(), f"to {page or 'no page'} {done.stderr[-500:]}"


if __name__ == "__main__":
    sys.exit(run_checks(checks, PICTURES, __doc__ or ""))
