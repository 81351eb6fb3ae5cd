"""The house: what may import what, that the package lists are the tree, and that nothing heavy is loaded on the way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib_compat

ROOT = Path(__file__).resolve().parent.parent.parent

# A file imports only from files above it. architectures/* count as one; nothing in the core looks down at formats or cli.
ORDER = [
    "errors", "dtypes", "boxes", "extents", "meshes", "parallel", "roles", "codecs", "files", "archives", "processes", "outputs",
    "containers.looks", "containers.safetensors", "containers.inert_pickle", "containers.zip_directory", "containers.torch_zip",
    "containers.pickle_writer", "containers.torch_pickle", "containers.torch_frame", "containers.distributed_tensors",
    "containers.dcp_metadata", "stored", "mosaics", "quantization", "architecture", "architectures", "containers.plain_yaml", "said",
    "declared_weights", "declarations", "skeletons", "shards", "index", "dcp_folder", "optimizers", "state_dicts", "collect", "rank_files",
    "flat_parameters", "wrappers", "join", "spellings", "canonical", "dequantization", "splits", "weight_counts", "collectives",
    "schedules", "activations", "estimates", "engine_versions", "engines", "kv_cache", "serving", "layout", "safetensors_file",
    "torch_file", "dcp_files", "model_files", "engine_files", "digests", "plans", "proof", "summaries", "engine.pool", "engine.journal",
    "engine.casts", "engine.transfer", "engine.values", "engine.run", "compare", "views", "adapter", "registry", "verbs", "planning",
]  # fmt: skip
OUTSIDE = {"__init__", "__main__", "containers", "engine"}


def module_name(path):
    parts = path.relative_to(ROOT / "reshard").with_suffix("").parts
    return "architectures" if parts[0] == "architectures" else ".".join(parts).removesuffix(".__init__")


def imported(path):
    """The modules of reshard that a file imports at its top level or inside functions, types aside."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "reshard":
            base = node.module.removeprefix("reshard").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                yield inner if inner in ORDER else base
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("reshard.") for alias in node.names if alias.name.startswith("reshard."))


def core_files():
    return [path for path in sorted((ROOT / "reshard").rglob("*.py")) if module_name(path) not in OUTSIDE]


def test_every_file_has_its_place_in_the_order():
    assert {module_name(path) for path in core_files()} == set(ORDER)


@pytest.mark.parametrize("path", core_files(), ids=module_name)
def test_imports_point_up_the_list_only(path):
    own = module_name(path)
    for other in imported(path):
        if other.startswith("architectures") and own in ("architecture", "architectures"):
            continue  # the lookup imports the one file that it is asked for; that one may build on a relative
        assert ORDER.index(other) < ORDER.index(own), f"{own} imports {other}"


@pytest.mark.parametrize("path", [*core_files(), *sorted((ROOT / "formats").rglob("*.py"))], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_below_imports_a_plugin_or_what_it_plugs_into(path):
    for node in ast.walk(ast.parse(path.read_text())):
        named = (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        assert not any("plugins" in name.split(".") or name.split(".")[0] == "vllm" for name in named)


@pytest.mark.parametrize("path", sorted((ROOT / "formats").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT / "formats")))
def test_no_format_imports_another(path):
    """A format that is a folder imports its own files relatively."""
    tree, most = ast.parse(path.read_text()), len(path.relative_to(ROOT / "formats").parts) - 1
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level <= most and "formats" not in (node.module or "").split(".") and "cli" not in (node.module or "").split(".")


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


@pytest.mark.parametrize("path", core_files(), ids=module_name)
def test_the_core_names_no_format(path):
    """As a word of its own in a string that the code uses; docstrings may tell examples. `verbs` names the one that is whole, and in
    headers of safetensors "pt" stands for torch."""
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    words = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
    }
    assert not words & set(format_names()) - {"verbs": {"hf"}, "safetensors_file": {"pt"}}.get(module_name(path), set())


def project():
    return tomllib_compat.load(ROOT / "pyproject.toml")


def test_the_packages_listed_are_the_tree():
    tools = project()["tool"]["setuptools"]
    folders = {"reshard": "reshard", "formats": "reshard.formats", "cli": "reshard.cli", "plugins": "reshard.plugins"}
    found = {
        ".".join([folders[top], *init.parent.relative_to(ROOT / top).parts])
        for top in folders
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert set(tools["packages"]) == found


def test_the_entry_points_are_the_files():
    points = project()["project"]["entry-points"]["reshard.formats"]
    assert points == {name: f"{module}:FORMAT" for name, module in format_modules().items()}


def test_the_plugins_are_the_files_and_each_has_its_door():
    """A file is called after the program that it is for, whose entry-point group says so."""
    groups = {group: points for group, points in project()["project"]["entry-points"].items() if group != "reshard.formats"}
    found = {point.partition(":")[0] for points in groups.values() for point in points.values()}
    assert found == {f"reshard.plugins.{path.stem}" for path in (ROOT / "plugins").glob("*.py") if path.stem != "__init__"}
    for group, points in groups.items():
        assert {point.partition(":")[0].rpartition(".")[2] for point in points.values()} == {group.partition(".")[0]}


def test_the_installed_formats_are_those_of_the_tree():
    from reshard import registry

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


def test_a_plugin_loads_nothing_heavy_before_it_is_asked():
    loaded = loaded_after(
        "from importlib.metadata import entry_points\n[point.load() for point in entry_points(group='vllm.general_plugins')]"
    )
    assert "reshard.plugins.vllm" in loaded and not loaded & {"numpy", "torch", "vllm", "reshard.verbs"}


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
