"""The slow check: the pages of --html in real headless Chromium, light, dark and narrow, with 21 and with 100,000 tensors.

    python tests/pictures/check.py [--reshard PATH] [--python PATH]

Needs Chromium and its driver (Debian: chromium, chromium-driver), and makes an environment with selenium (.venv-pictures) where there is
none.
Each page as a check that is counted: no message in the console, no request, nothing wider than the window, parts that unfold by keyboard, a
filter that finds; the strips of the map lie where the index says; and a page that breaks its own policy is noticed, so the check can fail.
"""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

from helpers.framework_environments import Environment, run_checks  # noqa: E402

PICTURES = Environment("pictures", HERE / "requirements.txt", with_torch=False)
FIXTURES = ROOT / "fixtures"
FSDP2 = (FIXTURES / "dcp" / "fsdp2" / "checkpoint", "--model", FIXTURES / "dcp" / "fsdp2" / "model")
HSDP = FIXTURES / "fsdp" / "hsdp-tp" / "checkpoint"
LLAMA, QWEN3 = FIXTURES / "hf" / "llama", FIXTURES / "hf" / "qwen3"
COMMANDS = {
    "inspect": ("inspect", HSDP),
    "one tensor": ("inspect", HSDP, "--tensor", "*q_proj*"),
    "plan": ("plan", *FSDP2, "--to", "vllm", "--tp", "8"),
    "verify": ("verify", LLAMA, QWEN3),
    "diff": ("diff", LLAMA, QWEN3),
    "doctor": ("doctor", FIXTURES / "dcp" / "odd" / "checkpoint", "--deep"),
    "degrees": ("degrees", LLAMA, "--gpu-memory", "80GiB", "--tp", "1,2,3"),
    "estimate": ("estimate", "--parameters", "7B", "--gpus", "8", "--pp", "4"),
    "what fits": ("estimate", "llama-3-70b", "--tp", "8", "--gpus", "64", "--gpu-memory", "80GB"),
    "many tokens": ("degrees", "llama-3-70b", "--gpu-memory", "80GB"),
    "run": ("log", FIXTURES / "delta", "--stats"),
}
LARGEST_PAGE = 2_000_000


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    pages = {}
    for name, arguments in COMMANDS.items():
        pages[name] = work / f"{name}.html"
        _run(reshard, *arguments, "--html", pages[name])
    pages["interactive"] = work / "interactive.html"
    _run(reshard, "inspect", *FSDP2, "--html", pages["interactive"], "--interactive")
    large = work / "large"
    _many_tensors(large, layers=100, experts=330)
    pages["100,000 tensors"] = work / "large.html"
    _run(reshard, "inspect", large, "--html", pages["100,000 tensors"])
    size = pages["100,000 tensors"].stat().st_size
    yield f"the page of 100,000 tensors has {size:,} bytes", size < LARGEST_PAGE, f"more than {LARGEST_PAGE:,}"
    pages["irregular names"] = work / "irregular.html"
    _many_tensors(work / "irregular", layers=1, experts=0, irregular=20_000)
    _run(reshard, "inspect", work / "irregular", "--html", pages["irregular names"])
    size = pages["irregular names"].stat().st_size
    yield f"the page of 20,000 irregular names has {size:,} bytes", size < LARGEST_PAGE, f"more than {LARGEST_PAGE:,}"
    broken = work / "broken.html"
    broken.write_text(
        pages["inspect"].read_text().replace("</main>", "<script>document.title='ran'</script><img src='http://127.0.0.1:9/x'></main>")
    )
    (work / "pages.json").write_text(json.dumps({"pages": {name: str(path) for name, path in pages.items()}, "broken": str(broken)}))
    boxes = json.loads(subprocess.run([reshard, "inspect", HSDP, "--tensor", "*q_proj*", "--json"], capture_output=True, check=True).stdout)
    (work / "boxes.json").write_text(json.dumps(boxes["tensors"][0]))
    done = subprocess.run([python, HERE / "browse.py", work / "pages.json", work / "boxes.json"], capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    yield from ((what, passed, detail) for what, passed, detail in results)
    yield "the browser came to the end", done.returncode == 0 and len(results) > 3 * len(pages), done.stderr[-2000:]


def _run(reshard: Path, *arguments: object) -> None:
    done = subprocess.run([reshard, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr


def _many_tensors(folder: Path, *, layers: int, experts: int, irregular: int = 0) -> None:
    """Headers of many small tensors in one sparse safetensors file."""
    folder.mkdir()
    names = [f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight" for layer in range(layers) for expert in range(experts)
             for part in ("gate", "up", "down")]  # fmt: skip
    names += [f"{chr(97 + i % 26)}x{i:05}y.{'z' * (i % 7)}w" for i in range(irregular)]
    header, shape = {}, [4, 2]
    for name in names:
        start = len(header) * 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, start + 2 * math.prod(shape)]}
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + len(header) * 2 * math.prod(shape))


if __name__ == "__main__":
    sys.exit(run_checks(checks, PICTURES, __doc__ or ""))
