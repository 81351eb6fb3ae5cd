"""`learn=True`, `layout_dir=` and the cache of layouts, with a stand-in for the engine's Python that says how its loader cuts weights.

tests/serving/learned.py does the same with real vLLM, against real ranks.
"""

import importlib
import json
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest
from helpers.fixture_places import HF
from helpers.reshard_command import reshard as command
from safetensors import safe_open

import reshard
from reshard.errors import RequestError, UnsupportedError

# In place of a Python with vLLM: tells a version, and answers the tracer's requests. Its loader cuts the rows of every matrix.
ENGINE = r"""#!{python}
import json, struct, sys
from pathlib import Path
here = Path(__file__).parent
if sys.argv[1] == "-c":
    print((here / "version").read_text())
    raise SystemExit
engine, requests, answer = sys.argv[2:]
lines = []
for request in json.loads(Path(requests).read_text()):
    with open(here / "asked.jsonl", "a") as log:
        log.write(json.dumps({"sizes": {p.name: p.stat().st_size for p in Path(request["model"]).iterdir()}, **request}) + "\n")
    file = Path(request["model"], "model.safetensors")
    stored = file.read_bytes()
    (length,) = struct.unpack("<Q", stored[:8])
    header = json.loads(stored[8 : 8 + length])
    header.pop("__metadata__", None)
    sources = {name: [entry["dtype"], entry["shape"]] for name, entry in header.items()}
    lines.append({"engine": engine, "version": (here / "version").read_text(), "platform": "cpu", "sources": sources})
    for case in request["cases"]:
        for rank in range(case["tp"]):
            tensors = {}
            for name, (dtype, shape) in sources.items():
                size = [shape[0] // (case["tp"] if len(shape) == 2 else 1), *shape[1:]]
                start = [size[0] * rank if len(shape) == 2 else 0, *[0] * (len(shape) - 1)]
                axes = [[n, axis, 1, axis, 1] for axis, n in enumerate(size)]
                tensors[name] = {"dtype": "bfloat16", "shape": size, "parts": [[name, start, [0] * len(size), axes, []]], "rest": []}
            lines.append({"case": case, "rank": rank, "class": "New", "dtype": "bfloat16", "tensors": tensors, "softened": []})
Path(answer).write_text("".join(json.dumps(line) + "\n" for line in lines))
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """The stand-in for a Python with vLLM; the cache is empty, and the environment names no library."""
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "version").write_text("0.32.0")
    python = folder / "python"
    python.write_text(ENGINE.replace("{python}", sys.executable))
    python.chmod(0o755)
    monkeypatch.setenv("RESHARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RESHARD_LAYOUT_DIR", raising=False)
    return python


@pytest.fixture
def model(tmp_path):
    """A model of a type that is not declared."""
    folder = shutil.copytree(HF / "llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "unheard_of", "architectures": ["New"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def asked(engine):
    """The requests that the engine got."""
    log = engine.parent / "asked.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def arrays(path):
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name).view(np.uint16) for name in file.keys()}  # noqa: SIM118


def is_cut_by_rows(model, out, tp):
    """Whether each rank holds its rows of every matrix, by numpy on whole arrays."""
    whole = arrays(model / "model.safetensors")
    for rank in range(tp):
        held = arrays(out / f"model-rank-{rank}-part-0.safetensors")
        expected = {name: np.split(array, tp)[rank] if array.ndim == 2 else array for name, array in whole.items()}
        if held.keys() != expected.keys() or not all(np.array_equal(held[name], expected[name]) for name in held):
            return False
    return True


def layouts(tmp_path):
    return sorted((tmp_path / "cache" / "layouts").iterdir())


def test_one_command_learns_keeps_the_layout_and_converts(engine, model, tmp_path):
    given = ("--to", "vllm", "--tp", 2, "--learn", "--engine-python", engine)
    assert command("convert", model, tmp_path / "out", *given).code == 0
    assert is_cut_by_rows(model, tmp_path / "out", 2) and reshard.verify(model, tmp_path / "out").equal
    (request,) = asked(engine)
    assert request["cases"] == [{"tp": 2, "pp": 1, "ep": 1}] and request["trust_remote_code"] is False
    assert request["sizes"].keys() == {"config.json", "generation_config.json", "model.safetensors"}
    assert request["sizes"]["model.safetensors"] < 4096, "a header without elements"
    # The second time nothing is traced, and the conversion counts as the same one.
    assert command("convert", model, tmp_path / "out", *given, "--if-changed").out.startswith(f"{tmp_path / 'out'}: unchanged")
    assert command("plan", model, *given).code == 0 and len(asked(engine)) == 1
    # Other sizes, another config and another version of the engine have layouts of their own.
    assert command("convert", model, tmp_path / "one", "--to", "vllm", "--tp", 1, *given[4:]).code == 0
    assert is_cut_by_rows(model, tmp_path / "one", 1)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    assert command("plan", model, *given).code == 0
    (engine.parent / "version").write_text("0.33.0")
    assert command("plan", model, *given).code == 0
    assert len(asked(engine)) == 4 == len(layouts(tmp_path))
    assert [path.name.split("-")[:4] for path in layouts(tmp_path)][-1] == ["unheard_of", "vllm", "0.33.0", "tp2"]


def test_the_cache_lists_layouts_and_removes_them(engine, model, tmp_path):
    plan = reshard.plan(model, to="vllm", tp=2, learn=True, engine_python=engine)
    entry = reshard.cache(plan)
    (path,) = layouts(tmp_path)
    rows = command("cache", "list", "--json").document["entries"]
    assert {row["path"]: row["format"] for row in rows} == {entry.path: "vllm 2 files, tp 2", str(path): "vllm 0.32.0 layout, TP 2"}
    assert path.name in command("cache", "list").out and len(layouts(tmp_path)) == 1
    assert command("cache", "clean", "--yes").code == 0 and not layouts(tmp_path)


def test_a_training_checkpoint_learns_from_its_own_names(engine, model, tmp_path):
    reshard.convert(reshard.plan(model, to="dcp"), tmp_path / "dcp")
    given = {"to": "vllm", "tp": 2, "learn": True, "engine_python": engine}
    reshard.convert(reshard.plan(tmp_path / "dcp", model=model, **given), tmp_path / "out")
    assert is_cut_by_rows(model, tmp_path / "out", 2)
    rank = reshard.open(model).view(rank=1, **given)["lm_head.weight"].numpy()
    expected = np.split(arrays(model / "model.safetensors")["lm_head.weight"].view(ml_dtypes.bfloat16), 2)[1]
    assert np.array_equal(np.asarray(rank).view(np.uint16), expected.view(np.uint16)) and len(asked(engine)) == 1


def test_a_folder_of_layouts_serves_whoever_has_no_engine(engine, model, tmp_path, monkeypatch):
    library = tmp_path / "library"
    library.mkdir()
    with pytest.raises(RequestError, match=r"no learned layout fits.*There is no layout of vLLM.*`learn=True`"):
        reshard.plan(model, to="vllm", tp=2, layout_dir=library)
    assert command("learn", model, "--engine", "vllm", "--tp", "1,2", "-o", library / "ours.json", "--engine-python", engine).code == 0
    (library / "notes.json").write_text("[]")
    reshard.convert(reshard.plan(model, to="vllm", tp=2, layout_dir=library), tmp_path / "out")
    assert is_cut_by_rows(model, tmp_path / "out", 2)
    with pytest.raises(RequestError, match=r"ours\.json: the layout does not cover TP 4"):
        reshard.plan(model, to="vllm", tp=4, layout_dir=library)
    # By the environment: where a type is not declared, and only there.
    monkeypatch.setenv("RESHARD_LAYOUT_DIR", str(library))
    assert command("convert", model, tmp_path / "again", "--to", "vllm", "--tp", 2).code == 0
    assert is_cut_by_rows(model, tmp_path / "again", 2) and not (tmp_path / "cache").exists()
    reshard.convert(reshard.plan(HF / "llama", to="vllm", tp=2), tmp_path / "declared")
    assert "reshard.layout.json" not in {path.name for path in (tmp_path / "declared").iterdir()}
    # What is learned goes there, too; of two that fit, the newer version's is taken unless the other one is asked for.
    (engine.parent / "version").write_text("0.33.0")
    reshard.plan(model, to="vllm", tp=2, learn=True, engine_python=engine)
    assert len([*library.iterdir()]) == 3
    notes = {version: str(reshard.plan(model, to="vllm", tp=2, **asked).layout.notes) for version, asked in
             (("0.33.0", {}), ("0.32.0", {"engine_version": "0.32.0"}))}  # fmt: skip
    assert all(f"vLLM {version} (New" in note for version, note in notes.items())


def test_a_plan_file_carries_the_layout(engine, model, tmp_path):
    given = ("--to", "vllm", "--tp", 2, "--learn", "--engine-python", engine)
    assert command("plan", model, *given, "--plan-out", tmp_path / "plan").code == 0
    shutil.rmtree(tmp_path / "cache")
    (engine.parent / "version").write_text("0.99.0")
    assert command("convert", model, tmp_path / "out", "--plan", tmp_path / "plan").code == 0
    assert is_cut_by_rows(model, tmp_path / "out", 2) and len(asked(engine)) == 1


def test_without_a_declaration_the_error_says_in_one_line_what_to_do(engine, model):
    with pytest.raises(UnsupportedError, match=r"not declared") as raised:
        reshard.plan(model, to="vllm", tp=2)
    assert raised.value.do.startswith("Add `learn=True` and `engine_python=PATH`") and "\n" not in raised.value.do
    shown = command("convert", model, "out", "--to", "vllm")
    assert shown.code != 0 and "Add --learn and --engine-python PATH" in shown.err
    with pytest.raises(UnsupportedError) as raised:  # nothing can be traced there
        reshard.plan(model, to="megatron")
    assert "learn" not in str(raised.value)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"learn": True, "layout": "x.json"}, "`layout=` and `learn=` contradict each other"),
        ({"layout_dir": ".", "layout": "x.json"}, "`layout=` and `layout_dir=` contradict each other"),
        ({"engine_python": "python"}, "`engine_python=` has a meaning only with `learn=True`"),
        ({"trust_remote_code": True}, "`trust_remote_code=` has a meaning only with `learn=True`"),
        ({"learn": True, "engine_python": sys.executable}, "there is no vllm in this Python.*`engine_python=PATH`"),
        ({"learn": True, "engine_python": "/no/such/python"}, "`engine_python=/no/such/python`: No such file"),
        ({"learn": True, "include": "*norm*"}, "needs the whole model"),
        ({"learn": True, "engine_version": "0.9.0"}, "`engine_version=0.9.0`: 0.32.0 is installed"),
    ],
)
def test_what_cannot_be_learned_is_refused(engine, model, options, words):
    with pytest.raises(RequestError, match=words):
        reshard.plan(model, to="vllm", tp=2, **{"engine_python": engine} | options if options.get("learn") else options)
    assert not asked(engine)


def test_a_checkpoint_without_a_config_or_of_a_draft_is_not_traced(engine, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["EagleLlamaForCausalLM"]}))
    with pytest.raises(RequestError, match="draft model"):
        reshard.plan(model, to="vllm", learn=True, engine_python=engine)
    (model / "config.json").unlink()
    with pytest.raises(RequestError, match=r"no config\.json.*`model=DIR`"):
        reshard.plan(model, to="vllm", learn=True, engine_python=engine)
    assert not asked(engine)


def test_inspect_proposes_it_where_an_engine_is_found(model, tmp_path, monkeypatch):
    assert f"next      reshard architectures --start {model} > my.yaml" in command("inspect", model).out
    (tmp_path / "packages" / "vllm").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    assert "--learn" not in command("inspect", model).out.split("next  ")[1].split("\n")[0], "a folder of that name is no engine"
    (tmp_path / "packages" / "vllm" / "__init__.py").write_text("raise ImportError('inspect imports no engine')")
    importlib.invalidate_caches()
    assert f"next      reshard convert {model} out --to vllm --tp 1 --learn" in command("inspect", model).out
    assert "--learn" not in command("inspect", HF / "llama").out
    with pytest.raises(UnsupportedError, match="Add `learn=True`: vLLM"):
        reshard.plan(model, to="vllm")
