"""The requests and the answer, as files.

    python loader_tracer ENGINE REQUESTS ANSWER

ENGINE is vllm or sglang. REQUESTS is a JSON list of {"model": folder, "cases": [{"tp": 8, "pp": 1, "ep": 1}], "ranks": [0, 7] or null,
"trust_remote_code": false}. ANSWER gets one JSON document per line. For each request: first what is traced and with what, then one line per
rank, or per case that the engine refuses.
"""

import sys
from pathlib import Path

if not __package__:
    # Run as a folder: its name must not be looked up on sys.path, where the folder's neighbours would hide the engine itself.
    import importlib.util

    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != here]
    spec = importlib.util.spec_from_file_location("loader_tracer", here / "__init__.py", submodule_search_locations=[str(here)])
    assert spec and spec.loader
    sys.modules["loader_tracer"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    __package__ = "loader_tracer"

from .trace import main

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
