"""The house: which room may import which, what keeps it small, that packages are the tree, that nothing heavy is loaded early."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from reshard.opening.keywords import OpenOptions, PlanOptions
from reshard.verbs.look.keywords import DegreeOptions, EstimateOptions

ROOT = Path(__file__).resolve().parent.parent.parent

# A room imports only rooms above it in this list. architectures/ is data.
ROOMS = [
    "secrets", "errors", "geometry", "storage", "containers", "models", "serving", "training", "index", "canonical", "plans", "adapter",
    "engine", "opening", "requests", "measures", "health", "runs", "live", "signing", "verbs", "torch", "picture", "pages", "doors",
    "testing",
]  # fmt: skip
CORE = sorted((ROOT / "reshard").rglob("*.py"))
FORMATS = sorted((ROOT / "formats").rglob("*.py"))
CLI = sorted((ROOT / "cli").rglob("*.py"))
PLUGINS = sorted((ROOT / "plugins").rglob("*.py"))
FILES = [*CORE, *FORMATS, *CLI, *PLUGINS]


def label(path):
    return str(path.relative_to(ROOT))


@cache
def parsed(path):
    return ast.parse(path.read_text())


@cache
def nodes(path):
    """All nodes of a file's syntax tree."""
    return [*ast.walk(parsed(path))]


def room(module):
    """The room of a dotted module name below `reshard`, such as "geometry.boxes"."""
    return module.partition(".")[0]


def module_name(path):
    return ".".join(path.relative_to(ROOT / "reshard").with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in CORE}


def imported(path):
    """The modules of reshard that a file imports: at its top level, inside functions, and for type checking alone."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "reshard":
            base = node.module.removeprefix("reshard").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                yield inner if inner in MODULES else base
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("reshard.") for alias in node.names if alias.name.startswith("reshard."))


def test_the_rooms_are_the_folders():
    folders = {path.parent.relative_to(ROOT / "reshard").parts[0] for path in CORE if path.parent != ROOT / "reshard"}
    assert folders | {"errors", "secrets"} == {*ROOMS}
    assert {path.stem for path in (ROOT / "reshard").glob("*.py")} == {"__init__", "__main__", "errors", "secrets"}


def test_a_room_imports_rooms_above_it_only():
    for path in [path for path in CORE if path.parent != ROOT / "reshard"]:
        here = room(module_name(path))
        for other in imported(path):
            if other:  # the root package itself holds the version, and opens the public names when asked
                assert room(other) == here or ROOMS.index(room(other)) < ROOMS.index(here), f"{label(path)} imports {other}"


# The rooms of the main job (docs/design.md), without `serving/learned`; what hangs beside them; and the one file that opens a side room.
MAIN = ("geometry", "storage", "containers", "index", "models", "canonical", "serving", "plans", "adapter", "opening", "requests", "engine")
SIDE = (
    "training", "serving.learned", "measures", "health", "runs", "live", "signing", "verbs", "torch", "pages", "picture", "doors",
    "testing",
)  # fmt: skip
DOOR_OF_LEARNED = "reshard/adapter/serving_format/learned.py"


def test_the_main_way_imports_no_side_room():
    for path in [MODULES[name] for name in MODULES if room(name) in MAIN and not name.startswith(SIDE)]:
        for other in imported(path):
            is_door = label(path) == DOOR_OF_LEARNED and other.startswith("serving.learned.")
            assert is_door or not f"{other}.".startswith(tuple(f"{side}." for side in SIDE)), f"{label(path)} imports {other}"


def test_only_the_laws_import_pytest():
    for path in FILES:
        names = {alias.name for node in nodes(path) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes(path) if isinstance(node, ast.ImportFrom)}
        assert "pytest" not in names or path.parent == ROOT / "reshard" / "testing", label(path)


def test_no_function_is_longer_than_60_lines():
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                last_of_text = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno
                lines = node.end_lineno - last_of_text + (node.body[0].lineno - node.lineno if ast.get_docstring(node) else 1)
                assert lines <= 60, f"{label(path)}:{node.lineno} {node.name} has {lines} lines"


# Left as they are: each is one thought about pickles.
LARGE = ("reshard/containers/inert_pickle.py", "reshard/containers/pickle_objects.py")


def test_no_class_and_no_file_is_large():
    for path in FILES:
        assert label(path) in LARGE or len(path.read_text().splitlines()) <= 600, f"{label(path)} has more than 600 lines"
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                lines, methods = node.end_lineno - node.lineno + 1, sum(isinstance(item, ast.FunctionDef) for item in node.body)
                assert lines <= 300 and methods <= 30, f"{label(path)}:{node.lineno} {node.name} has {lines} lines, {methods} methods"


@pytest.mark.parametrize("name", [name for name in ROOMS if (ROOT / "reshard" / name).is_dir()])
def test_inside_a_room_nothing_runs_in_a_circle(name):
    graph = {module: {other for other in imported(path) if other != module} for module, path in MODULES.items() if room(module) == name}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("top", ["formats", "cli", "plugins"])
def test_outside_the_core_nothing_runs_in_a_circle(top):
    graph = {}
    for path in sorted((ROOT / top).rglob("*.py")):
        names = set()
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parent
                for _ in range(node.level - 1):
                    folder = folder.parent
                base = folder.joinpath(*(node.module or "").split(".")) if node.module else folder
                for alias in node.names:
                    target = next(
                        (t for t in (base / f"{alias.name}.py", base.with_suffix(".py"), base / "__init__.py") if t.exists()), None
                    )
                    if target and target != path and target.name != "__init__.py":
                        names.add(target)
        graph[path] = names
    TopologicalSorter(graph).prepare()


def folders_of_code():
    return sorted({path.parent for path in FILES})


def test_a_room_has_at_most_about_a_dozen_files():
    for folder in folders_of_code():
        assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= 14, label(folder)
        inner = {inner.name for inner in folders_of_code() if inner.parent == folder}
        assert inner <= {*ROOMS} if folder == ROOT / "reshard" else len(inner) <= 20, label(folder)


def public_classes():
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, path


def test_a_public_class_name_is_defined_once():
    where = {}
    for name, path in public_classes():
        where.setdefault(name, []).append(label(path))
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def is_dataclass(node):
    words = ("dataclass", "id='value'", "id='mutable'")
    return any(word in ast.dump(decorator) for decorator in node.decorator_list for word in words)


def test_the_fields_of_a_value_are_explained_where_they_stand():
    """A dataclass with five fields or more has a string under each field."""
    for path in FILES:
        for node in nodes(path):
            if not (isinstance(node, ast.ClassDef) and is_dataclass(node)):
                continue
            fields = [i for i, item in enumerate(node.body) if isinstance(item, ast.AnnAssign)]
            if len(fields) < 5:
                continue
            for i in fields:
                following = node.body[i + 1] if i + 1 < len(node.body) else None
                assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant), (
                    f"{label(path)}:{node.body[i].lineno} {node.name}.{node.body[i].target.id} is not explained"
                )


def test_no_function_takes_more_than_eight_parameters():
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                names = [
                    arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if arg.arg not in ("self", "cls")
                ]
                assert len(names) <= 8, f"{label(path)}:{node.lineno} {node.name} takes {len(names)}"


def test_nobody_asks_a_format_what_it_has():
    """Format is a class with typed members and defaults: hasattr and getattr with a literal name are not needed."""
    for path in [path for path in [*CORE, *CLI] if {"adapter", "engine", "verbs", "commands"} & {*path.relative_to(ROOT).parts}]:
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
                assert not (len(node.args) > 1 and isinstance(node.args[1], ast.Constant)), f"{label(path)}:{node.lineno}"


def test_command_names_are_python_names():
    import reshard

    main = __import__("importlib").import_module("reshard.cli.main")
    commands = {name.replace("-", "_") for name in main.COMMANDS}
    assert commands - {"formats", "architectures", "versions", "completion", "inspect", "cat", "export", "env", "clean"} <= set(
        reshard.__all__
    )


def test_nothing_below_imports_a_plugin_or_what_it_plugs_into():
    for path in [*CORE, *FORMATS]:
        for node in nodes(path):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any("plugins" in name.split(".") or name.split(".")[0] == "vllm" for name in named), label(path)


# Connects to the Ray cluster that the user names.
CLUSTER = "reshard/engine/on_ray.py"
# They connect to the stores of URLs that the user names.
STORES = [f"reshard/storage/stores/{name}.py" for name in ("obstore_backend", "web_backend", "fsspec_backend", "pending_uploads")]
# They speak HTTP.
HTTP = ["reshard/storage/server.py", "reshard/storage/stores/http_answer.py"]
# Listens while an update of a running server is open, for those who know its secret (tests/live/test_strangers.py).
MEETING = "reshard/live/wire/meeting.py"
# One listens for clients of virtual folders (tests/doors/test_server.py), and one takes URLs apart.
DOORS = ["reshard/doors/server.py", "reshard/doors/fronts/messages.py"]
NETWORK = {
    "obstore", "boto3", "aiohttp", "asyncio", "fsspec", "ftplib", "http", "httpx", "huggingface_hub", "ray", "requests", "smtplib",
    "socket", "ssl", "urllib",
}  # fmt: skip


def test_nothing_else_can_open_a_network_connection():
    """SECURITY.md promises it: those of stores can, and one connects to an address of the command line. That it does no more is tested in
    tests/cli/test_live_server.py."""
    for path in [*CORE, *FORMATS, *CLI]:
        if label(path) not in (*STORES, *HTTP, *DOORS, CLUSTER, MEETING):
            for node in nodes(path):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert not NETWORK & {name.split(".")[0] for name in names}, label(path)


def test_one_verb_and_live_ask_a_server():
    asking = ("verbs.verify_server", "verbs.verify", "live.from_files.running_server")
    asking += ("live.engines.control", "live.engines.choice")
    users = {"storage.server": asking, "verbs.verify_server": ("verbs.verify",)}
    for path in [*CORE, *FORMATS, *CLI]:
        for used in set(imported(path)) & users.keys():
            assert path in [MODULES.get(user) for user in users[used]] or label(path) == "cli/commands/verify.py", label(path)


def test_no_format_imports_another():
    """A format that is a folder imports its own files relatively."""
    for path in FORMATS:
        most = len(path.relative_to(ROOT / "formats").parts) - 1
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= most and not {"formats", "cli"} & {*(node.module or "").split(".")}, label(path)


def format_modules():
    """Name -> module of every file that ends in a FORMAT; that of a folder's __init__ is called after the folder."""
    found = {}
    for path in (ROOT / "formats").rglob("*.py"):
        if "\nFORMAT = " in path.read_text():
            parts = path.relative_to(ROOT / "formats").with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[parts[-1].replace("_", "-")] = ".".join(("reshard", "formats", *parts))
    return found


def format_names():
    return sorted(format_modules())


def test_the_core_names_no_format():
    """As a word of its own in a string that the code uses; docstrings may tell examples. `verbs` names the one that is whole, in headers of
    safetensors "pt" stands for torch, nanotron is also the trainer that gives weights its names, and `delta` is also a verb."""
    allowed = {
        "__init__": "delta",
        "verbs.delta": "delta",
        "verbs.steps.kept": "delta",
        "verbs.watch": "delta",
        "verbs.roundtrip": "hf",
        "doors.hub": "hf",
        "plans.layout": "pt",
        "canonical.trainer_names": "nanotron",
    }
    names = {*format_names()}
    for path in CORE:
        documentation = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
        constants = [node for node in nodes(path) if isinstance(node, ast.Constant) and id(node) not in documentation]
        words = {node.value for node in constants if isinstance(node.value, str)}
        assert not words & names - {allowed.get(module_name(path))}, label(path)


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_packages_installed_are_the_tree():
    """Every folder with code has an __init__.py, so that setup.py finds it, and is installed under its name."""
    from importlib.util import find_spec

    for folder in folders_of_code():
        parts = folder.relative_to(ROOT).parts
        name = ".".join(parts if parts[0] == "reshard" else ("reshard", *parts))
        assert (folder / "__init__.py").exists() and find_spec(name) is not None, name


def test_the_parts_of_the_ci_are_listed():
    """`.ci/run --list` finds every part with a line that says what it checks."""
    listed = subprocess.run(["bash", ROOT / ".ci" / "run", "--list"], capture_output=True, text=True, check=True).stdout.splitlines()
    lanes = re.findall(r"^(?:PARTS|BESIDE)=\((.+)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    parts = " ".join(lanes).split()
    assert len(lanes) == 2 and [line.split()[0] for line in listed] == parts and all(len(line.split()) > 1 for line in listed)


def test_the_version_is_said_alike():
    import reshard

    assert project()["project"]["version"] == reshard.__version__
    assert f"## [{reshard.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_table_of_formats_lists_the_files():
    own = import_module("reshard.formats.signatures")
    modules = format_modules()
    assert sorted(own.SIGNATURES) == sorted(modules)
    shared = {name: f"reshard.formats.{module}" for name, module in own.SHARED_FOLDERS.items()}
    assert shared == {name: module for name, module in modules.items() if module != f"reshard.formats.{name.replace('-', '_')}"}


def test_the_plugins_are_the_files_and_each_has_its_door():
    """A file is called after the program that it is for, whose entry-point group says so."""
    groups = {group: points for group, points in project()["project"]["entry-points"].items() if not group.startswith("reshard.")}
    found = {point.partition(":")[0] for points in groups.values() for point in points.values()}
    assert found == {f"reshard.plugins.{path.stem}" for path in (ROOT / "plugins").glob("*.py") if path.stem != "__init__"}
    for group, points in groups.items():
        assert {point.partition(":")[0].rpartition(".")[2] for point in points.values()} == {group.partition(".")[0]}


def test_the_installed_formats_are_those_of_the_tree():
    from reshard.adapter import registry

    assert sorted(registry.formats()) == format_names()


def loaded_after(code):
    """The modules loaded after a piece of code has run in a fresh interpreter."""
    script = f"import sys\nsys.argv = ['reshard']\n{code}\nprint(chr(10).join(sys.modules), file=sys.stderr)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(found.stderr.split())


RUN = "import importlib; importlib.import_module('reshard.cli.main').run({})"


def test_help_loads_neither_numpy_nor_torch():
    assert not loaded_after(RUN.format(["--help"])) & {"numpy", "torch", "tqdm"}
    assert not loaded_after(RUN.format(["convert", "--help"])) & {"numpy", "torch", "tqdm"}
    assert not loaded_after("import reshard") & {"numpy", "torch", "click"}


def test_a_small_inspection_loads_only_what_it_shows():
    """What else is loaded costs processor time at every start: pictures, archives, what moves bytes, readers of other formats."""
    llama = str(ROOT / "fixtures" / "hf" / "llama")
    loaded = loaded_after(RUN.format(["inspect", llama]))
    unneeded = {"html", "hashlib", "tarfile", "torch", "concurrent.futures", "importlib.metadata", "tempfile", "random"}
    assert not loaded & unneeded - loaded_after("import numpy, click, yaml, blake3, logging, json")
    rooms = ("picture", "measures", "health", "training", "engine.transfer", "engine.casts", "formats.megatron.read", "formats.dcp.read")
    assert not [name for name in loaded if name.startswith(tuple(f"reshard.{room}" for room in rooms))]
    assert "reshard.picture" not in loaded_after(RUN.format(["diff", llama, llama, "--quiet"]))
    assert "reshard.picture" not in loaded_after(RUN.format(["convert", llama, "unused", "--to", "vllm", "--dry-run"]))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list a process's threads")
def test_numpy_starts_no_threads_in_a_command():
    """OpenBLAS would start one for each processor, and each waits in a busy loop for a tenth of a second."""
    llama = str(ROOT / "fixtures" / "hf" / "llama")
    count = "import atexit, os, sys; atexit.register(lambda: print(len(os.listdir('/proc/self/task')), file=sys.stderr))"
    script = f"{count}; sys.argv = ['reshard', 'inspect', {llama!r}]; from reshard.cli.main import main; main()"
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert found.stderr.split() == ["1"]


def heavy(modules):
    return sorted(name for name in modules if name in ("numpy", "torch", "pickle") or name.startswith("reshard.containers."))


@pytest.mark.parametrize("module", format_modules().values())
def test_a_formats_module_is_light(module):
    """It imports its reader and its writer when they are needed."""
    assert heavy(loaded_after(f"import {module}")) == []


def test_detecting_loads_a_reader_only_to_look_into_a_file():
    folder = str(ROOT / "fixtures" / "hf" / "llama")
    detect = f"from reshard.adapter import registry\nfrom reshard.storage.files import LocalFiles\nregistry.detect(LocalFiles({folder!r}))"
    assert heavy(loaded_after(detect)) == []


def test_below_the_command_line_texts_name_keywords_and_not_flags():
    """`model=DIR`, of which the command line makes --model DIR. Whole commands stand in backticks with their flags."""
    flags = {
        f"--{name.replace('_', '-')}"
        for declared in (PlanOptions, OpenOptions, DegreeOptions, EstimateOptions)
        for name in declared.__annotations__
    }
    flags |= {"--to", "--resume", "--overwrite", "--if-changed", "--checksums", "--deep"}
    for path in [*CORE, *FORMATS, *PLUGINS]:
        fields = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in fields and path.name != "launcher.py":
                plain = " ".join(node.value.split("`")[::2])
                words = {*re.findall(r"--[a-z][a-z-]*", plain)} & flags
                assert not words or "`" in node.value or plain.strip() in flags or plain.startswith(" --"), f"{label(path)}: {node.value}"


def test_a_plugin_loads_nothing_heavy_before_it_is_asked():
    loaded = loaded_after(
        "from importlib.metadata import entry_points\n[point.load() for point in entry_points(group='vllm.general_plugins')]"
    )
    assert "reshard.plugins.vllm" in loaded and not loaded & {"numpy", "torch", "vllm", "reshard.opening.checkpoint"}


@pytest.mark.parametrize(
    "case, arguments",
    [
        ("dcp/fsdp2", ["inspect"]),
        ("dcp/fsdp2", ["fingerprint"]),
        ("dcp/fsdp2", ["roundtrip", "--to", "hf"]),
        ("dcp/fsdp2", ["roundtrip", "--to", "dcp"]),
        ("deepspeed/z3-4", ["fingerprint"]),
        ("deepspeed/z3-4", ["roundtrip", "--to", "universal"]),
        ("deepspeed/z3-4", ["roundtrip", "--to", "deepspeed", "--dp", "3"]),
        ("deepspeed/z3-4", ["roundtrip", "--to", "hf", "--dtype", "bf16"]),
        ("universal/z3-frozen", ["fingerprint"]),
    ],
)
def test_without_a_cast_torch_is_never_loaded(case, arguments):
    source = str(ROOT / "fixtures" / case / "checkpoint")
    loaded = loaded_after(RUN.format([arguments[0], source, *arguments[1:]]))
    assert "numpy" in loaded and "torch" not in loaded
