"""The contract of the command line: words, exit codes, documents with stable keys."""

import json
import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import numpy as np
import pytest
import safetensors.torch
import torch
from helpers.fixture_places import CASES, DCP, HF, MODELS, stored
from helpers.reshard_command import command, reshard, result_tree, tree

import reshard as library

COMMANDS = ("inspect", "convert", "verify", "fingerprint", "roundtrip", "plan", "estimate", "formats", "architectures")
FSDP2 = (DCP / "fsdp2" / "checkpoint", "--model", DCP / "fsdp2" / "model")


def model_of(case):
    return ("--model", DCP / case / "model") if (DCP / case / "model").exists() else ()


def test_help_lists_every_command_and_the_exit_codes():
    shown = reshard("--help")
    assert shown.code == 0 and all(name in shown.out for name in COMMANDS) and "130" in shown.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    shown = reshard(name, "--help")
    assert shown.code == 0 and shown.out.startswith(f"Usage: reshard {name}") and shown.err == ""


def test_usage_errors_are_exit_code_2():
    for arguments in (("nonsense",), ("convert",), ("inspect", HF / "llama", "--nonsense"), ("convert", "a", "b")):
        result = reshard(*arguments)
        assert result.code == 2 and result.out == "" and result.err


@pytest.mark.parametrize("folder", [HF / model for model in MODELS] + [HF / "llama-bin", HF / "llama-sharded"], ids=lambda path: path.name)
def test_inspect_shows_a_hugging_face_folder(folder):
    shown = reshard("inspect", folder)
    assert shown.code == 0 and "parameters" in shown.out and "layers." in shown.out


@pytest.mark.parametrize("case", CASES)
def test_inspect_shows_a_training_checkpoint(case):
    shown = reshard("inspect", DCP / case / "checkpoint", *model_of(case))
    assert shown.code == 0 and "dcp" in shown.out and "weight" in shown.out


def test_inspect_says_kinds_sharding_and_the_run(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    out = reshard("inspect", *FSDP2).out
    for words in ("llama, 61,728 parameters: 2 layers", "moment1", "moment2", "step", "4 along axis 0", "layers.{0..1}"):
        assert words in out


def test_inspect_shows_which_file_holds_which_box():
    out = reshard("inspect", *FSDP2, "--tensor", "*embed_tokens*").out
    assert "[0:63, 0:32]" in out and "__0_0.distcp" in out and "lm_head" not in out
    result = reshard("inspect", *FSDP2, "--tensor", "nonsense")
    assert result.code == 2 and "nonsense" in result.err


def test_inspects_document_has_stable_keys():
    summary, document = reshard("inspect", *FSDP2, "--json").document, reshard("inspect", *FSDP2, "--json", "--full").document
    assert list(summary) == [
        "schema_version", "path", "format", "detected_by", "producer", "version", "step", "parallel", "model_type", "architecture_known",
        "parameters", "parameters_as_stored", "experts", "bytes", "files", "kinds", "models", "quantized", "adapter", "tensor_count",
        "withheld_count", "object_count", "notes", "mesh", "outlook", "tree", "shares",
    ]  # fmt: skip
    assert list(document) == [*summary, "tensors", "withheld", "objects"] and {name: document[name] for name in summary} == summary
    chosen = reshard("inspect", *FSDP2, "--json", "--tensor", "*norm*").document["tensors"]
    assert chosen == [tensor for tensor in document["tensors"] if "norm" in tensor["name"]] and chosen
    assert summary["tensor_count"] == len(document["tensors"]) and summary["object_count"] == len(document["objects"])
    assert document["format"] == "dcp" and document["parameters"] == 61728 and len(document["files"]) == 4
    assert list(document["tensors"][0]) == ["name", "kind", "dtype", "shape", "bytes", "sharding", "pieces", "placements"]
    assert list(document["tensors"][0]["pieces"][0]) == ["file", "offsets", "sizes", "replica", "rank"]
    assert sum(np.prod(piece["sizes"]) for t in document["tensors"] if t["kind"] == "weight" for piece in t["pieces"]) == 61728


def test_a_dry_run_shows_each_rank_and_writes_nothing(tmp_path):
    shown = reshard("convert", *FSDP2[:1], tmp_path / "out", *FSDP2[1:], "--to", "vllm", "--tp", 4, "--dry-run", "--dtype", "fp16")
    assert shown.code == 0 and not (tmp_path / "out").exists()
    for words in (
        "model-rank-3-part-0.safetensors",
        "6..7",
        "192..249",
        "cast",
        "21 tensors from BF16 to F16",
        "21 moment1",
        "optimizer state",
        "checked",
    ):
        assert words in shown.out
    line = next(line for line in shown.out.splitlines() if "model-rank-3" in line)
    assert line.split()[-1] == "6", "250 rows are padded to 256"


def test_converts_document_has_stable_keys(tmp_path):
    arguments = ("convert", HF / "llama", tmp_path / "out", "--to", "vllm", "--tp", 2, "--json")
    planned, full = reshard(*arguments, "--dry-run").document, reshard(*arguments, "--dry-run", "--full").document
    done = reshard(*arguments).document
    assert [*planned][:7] == ["schema_version", "source", "adapter", "combined", "deltas", "target", "totals"]
    assert [*planned][7:] == ["files", "sidecars", "left", "notes", "dropped", "findings", "ranks"]
    assert list(full) == [*planned, "tensors", "tasks", "left_files", "dropped_tensors"]
    assert list(done) == [
        "schema_version", "path", "files", "dropped", "left", "notes", "findings", "fingerprint", "seconds", "unchanged", "source_checks",
        "source_digests", "overflow",
    ]  # fmt: skip
    assert [rank["query_heads"] for rank in planned["ranks"]] == [[0, 4], [4, 8]]
    assert [rank["padding_rows"] for rank in planned["ranks"]] == [0, 6]
    everything = reshard(*arguments, "--overwrite", "--full").document
    assert list(everything) == [*done, "plan"] and everything["plan"] == {name: full[name] for name in full if name != "schema_version"}
    assert done["fingerprint"] == reshard("fingerprint", HF / "llama", "--json").document["fingerprint"]
    assert {file["path"]: file["bytes"] for file in done["files"]} == {
        path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")
    }


def test_another_folders_layout_is_asked_for_by_its_name(tmp_path):
    done = reshard("convert", HF / "mixtral-fused", tmp_path / "out", "--to", "hf", "--like", HF / "mixtral-fused", "--json", "--full")
    assert done.code == 0 and done.document["plan"]["target"]["options"] == {"like": str(HF / "mixtral-fused")}
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (HF / "mixtral-fused" / "model.safetensors").read_bytes()
    refused = reshard("convert", HF / "llama", tmp_path / "no", "--to", "hf", "--like", HF / "qwen3")
    assert refused.code == 2 and "self_attn.q_norm.weight" in refused.err and not (tmp_path / "no").exists()
    shown = reshard("convert", HF / "mixtral-fused", tmp_path / "no", "--to", "hf", "--dry-run")
    assert "stored under other names" in shown.out


def test_the_companions_go_along(tmp_path):
    (tmp_path / "m").mkdir()
    for name, content in tree(HF / "llama").items():
        (tmp_path / "m" / name).write_bytes(content)
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    (tmp_path / "m" / "optimizer.pt").write_text("no")
    assert reshard("convert", tmp_path / "m", tmp_path / "out", "--to", "vllm", "--tp", 2).code == 0
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "reshard.json"} <= found and "optimizer.pt" not in found
    assert (tmp_path / "out" / "config.json").read_bytes() == (HF / "llama" / "config.json").read_bytes()


def test_only_what_is_asked_for_is_cast_and_as_torch_casts(tmp_path):
    assert (
        reshard(
            "convert", HF / "llama", tmp_path / "out", "--to", "hf", "--dtype", "fp8", "--keep-dtype", "*norm*", "--keep-dtype", "lm_head*"
        ).code
        == 0
    )
    before = safetensors.torch.load_file(HF / "llama" / "model.safetensors")
    after = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in before.items():
        expected = tensor if "norm" in name or "lm_head" in name else tensor.to(torch.float8_e4m3fn)
        assert after[name].dtype == expected.dtype
        assert torch.equal(after[name].view(torch.uint8), expected.view(torch.uint8)), name
    result = reshard("convert", HF / "llama", tmp_path / "x", "--to", "hf", "--dtype", "int8")
    assert result.code == 2 and "--dtype int8" in result.err


def test_names_are_chosen_by_globs(tmp_path):
    assert reshard("convert", HF / "llama", tmp_path / "out", "--to", "hf", "--include", "*.layers.1.*", "--exclude", "*mlp*").code == 0
    names = set(stored(tmp_path / "out" / "model.safetensors"))
    assert names == {n for n in stored(HF / "llama" / "model.safetensors") if ".layers.1." in n and "mlp" not in n}
    result = reshard("convert", HF / "llama", tmp_path / "x", "--to", "hf", "--include", "nonsense")
    assert result.code == 2 and "--include 'nonsense' matches none of 21 tensor names" in result.err


def test_masters_are_refused_where_there_are_none(tmp_path):
    result = reshard("convert", *FSDP2[:1], tmp_path / "x", *FSDP2[1:], "--to", "hf", "--weights", "master")
    assert result.code == 2 and "no full-precision masters" in result.err
    assert reshard("fingerprint", *FSDP2, "--weights", "model").code == 0


def test_one_fingerprint_for_the_same_weights_in_any_layout(tmp_path):
    expected = reshard("fingerprint", *FSDP2, "--json").document["fingerprint"]
    for number, options in enumerate(
        (("hf",), *(("vllm", "--tp", tp) for tp in (1, 2, 4, 8)), ("vllm", "--tp", 2, "--pp", 2), ("hf", "--max-shard-size", "20kB"))
    ):
        target = tmp_path / str(number)
        assert reshard("convert", FSDP2[0], target, *FSDP2[1:], "--to", *options).code == 0
        assert reshard("fingerprint", target, "-q").out == f"{expected}  {target}\n"
        assert json.loads((target / "reshard.json").read_text())["fingerprint"] == expected


def test_verify_tells_equal_from_different(tmp_path):
    same = reshard("verify", HF / "llama", HF / "llama-bin")
    assert same.code == 0 and same.out.startswith("equal: 21 tensors")
    different = reshard("verify", HF / "llama", HF / "qwen3")
    assert different.code == 1 and "q_norm" in different.out
    document = reshard("verify", HF / "llama", HF / "qwen3", "--json").document
    keys = ["schema_version", "equal", "tensors", "bytes", "differences", "notes", "source_checks", "server", "signature"]
    assert list(document) == keys and not document["equal"]
    assert list(document["differences"][0]) == ["name", "kind", "detail"]


def test_verify_casts_only_when_told(tmp_path):
    assert reshard("convert", HF / "llama", tmp_path / "half", "--to", "vllm", "--tp", 2, "--dtype", "fp16").code == 0
    assert reshard("verify", HF / "llama", tmp_path / "half").code == 1
    assert reshard("verify", HF / "llama", tmp_path / "half", "--cast").code == 0


def test_verify_takes_one_sides_config_for_both(tmp_path):
    case = DCP / "fsdp2-tied"
    assert reshard("convert", case / "checkpoint", tmp_path / "out", "--to", "vllm", "--tp", 2, "--model", case / "model").code == 0
    assert reshard("verify", case / "checkpoint", tmp_path / "out").code == 0
    assert reshard("verify", tmp_path / "out", case / "checkpoint", "--model", case / "model").code == 0


@pytest.mark.parametrize("how", [(), ("--materialize",)])
def test_a_round_trip_is_lossless_and_says_how_it_knows(how):
    shown = reshard("roundtrip", *FSDP2, "--to", "vllm", "--tp", 8, *how)
    assert shown.code == 0 and shown.out.startswith("lossless for the weights: 21 tensors") and ("converted" in shown.out) == bool(how)
    assert "left out  21 moment1: optimizer state" in shown.out
    document = reshard("roundtrip", *FSDP2, "--to", "vllm", "--tp", 8, *how, "--json").document
    assert list(document) == ["schema_version", "lossless", "materialized", "tensors", "boxes", "bytes", "losses", "left"]
    assert not document["lossless"] and not document["losses"] and len(document["left"]) == 3
    whole = reshard("roundtrip", *FSDP2, "--to", "dcp", "--optimizer", *how, "--json")
    assert whole.code == 0 and whole.document["lossless"] and not whole.document["left"]


@pytest.mark.parametrize("how", [(), ("--materialize",)])
def test_a_round_trip_without_a_weight_is_not_lossless(how):
    shown = reshard("roundtrip", HF / "llama", "--to", "hf", "--exclude", "*layers.0*", *how)
    assert shown.code == 1 and shown.out.startswith("not lossless: 9 losses")
    assert "model.layers.0.self_attn.q_proj.weight: it is left out: left out by --include or --exclude" in shown.out


@pytest.mark.parametrize("how", [(), ("--materialize",)])
def test_a_lossy_round_trip_is_exit_code_1(how):
    shown = reshard("roundtrip", HF / "llama", "--to", "hf", "--dtype", "fp8", *how)
    assert shown.code == 1 and "F8_E4M3" in shown.out


def test_formats_and_architectures_are_listed():
    assert reshard("formats", "--json").document["formats"][0].keys() == {"name", "reads", "writes", "summary"}
    assert {"llama", "mistral", "qwen2", "qwen3"} <= set(reshard("architectures").out.split())


def test_a_format_can_be_named_and_must_fit():
    assert reshard("inspect", HF / "llama", "--format", "hf").code == 0
    for name, code in (("dcp", 3), ("vllm", 3), ("nonsense", 2)):
        assert reshard("inspect", HF / "llama", "--format", name).code == code, name


def test_workers_and_memory_are_bounds(tmp_path):
    for number, options in enumerate((("--workers", 1), ("--workers", 5), ("--memory", "32MiB"))):
        assert reshard("convert", HF / "llama", tmp_path / str(number), "--to", "vllm", *options).code == 0
    result = reshard("convert", HF / "llama", tmp_path / "x", "--to", "vllm", "--memory", "1MiB")
    assert result.code == 2 and "8,388,608" in result.err and not (tmp_path / "x").exists()
    assert reshard("convert", HF / "llama", tmp_path / "x", "--to", "vllm", "--memory", "much").code == 2


def test_an_error_is_one_paragraph_and_debug_adds_the_traceback(tmp_path):
    plain = reshard("inspect", tmp_path / "absent")
    assert plain.code == 2 and plain.err.count("\n") == 1 and "Traceback" not in plain.err
    assert "Traceback" in reshard("--debug", "inspect", tmp_path / "absent").err


def test_a_reader_that_goes_away_is_no_error():
    process = subprocess.Popen(command("inspect", *FSDP2, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", ">&- 2>&- <&-"])
def test_closed_standard_streams_discard_what_is_printed(tmp_path, closed):
    """And nothing that is printed ends in the files that are opened instead of them."""
    runs = {
        "show": ["inspect", *FSDP2],
        "json": ["inspect", *FSDP2, "--json"],
        "write": ["convert", HF / "llama", tmp_path / "closed", "--to", "hf", "-v"],
        "refuse": ["inspect", tmp_path / "absent"],
    }
    codes = {name: subprocess.run(["bash", "-c", f"{shlex.join(command(*line))} {closed}"]).returncode for name, line in runs.items()}
    assert codes == {"show": 0, "json": 0, "write": 0, "refuse": 2}
    assert reshard("convert", HF / "llama", tmp_path / "open", "--to", "hf").code == 0
    assert result_tree(tmp_path / "closed") == result_tree(tmp_path / "open")


@pytest.mark.parametrize("lack", [MemoryError(), MemoryError("Unable to allocate 31.0 MiB"), RuntimeError("can't start new thread")])
def test_a_lack_of_memory_is_no_defect(monkeypatch, lack):
    def work(*arguments, **options):
        raise lack

    monkeypatch.setattr(library, "open", work, raising=False)
    result = reshard("inspect", HF / "llama")
    assert result.code == 5 and result.err.startswith(f"reshard: The system gives reshard no more memory ({str(lack) or 'MemoryError'}).")
    assert result.err.count("\n") == 1 and "--workers 1" in result.err and result.err.endswith("[no-memory]\n")


def test_progress_is_on_a_terminal_or_when_asked_for(tmp_path):
    assert reshard("convert", HF / "llama", tmp_path / "a", "--to", "hf").err == ""
    assert "100%" in reshard("convert", HF / "llama", tmp_path / "b", "--to", "hf", "--progress").err


def test_full_needs_json():
    refused = reshard("plan", HF / "llama", "--to", "vllm", "--full")
    assert refused.code == 2 and "--full has a meaning only with --json" in refused.err and refused.out == ""


def test_python_and_the_command_line_return_the_same_result(tmp_path):
    import reshard as library

    result = library.convert(library.plan(library.open(DCP / "fsdp2" / "checkpoint"), to="hf"), tmp_path / "a")
    printed = reshard("convert", DCP / "fsdp2" / "checkpoint", tmp_path / "b", "--to", "hf", "--json").document
    own = {**result.to_json(), "schema_version": 1, "path": str(tmp_path / "b"), "seconds": printed["seconds"]}
    own = json.loads(import_module("reshard.cli.spelling").with_flags(json.dumps(own)))  # the command line names flags, not keywords
    assert own == printed and result.fingerprint.root in str(result) and str(tmp_path / "a") in str(result)
    groups = {(group.reason, group.kind): group.tensors for group in result.dropped}
    assert len(groups) == len(result.dropped) >= 2 and all(number > 1 for number in groups.values())
    assert result.files == {path.name: path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors")}


def test_a_dry_run_to_a_url_is_refused_like_a_conversion(tmp_path):
    for target in ("https://host/out", "file:///tmp/out"):
        codes = {reshard("convert", HF / "llama", target, "--to", "hf", *options).code for options in ((), ("--dry-run",))}
        assert codes == {6}
    assert reshard("convert", HF / "llama", "a\0b", "--to", "hf", "--dry-run").code == 2


@pytest.mark.parametrize("count, listed", [(21, 21), (30, 20)])
def test_a_long_list_of_files_is_cut_and_json_has_all(tmp_path, count, listed):
    """One file above the limit is listed, too: the sentence about it would take the same line."""
    arguments = ("convert", HF / "llama", tmp_path / "out", "--to", "fsdp", "--dp", count)
    shown = reshard(*arguments)
    files = sorted((tmp_path / "out").glob("*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    assert len(files) == count and len([line for line in shown.out.splitlines() if ".pt " in line]) == listed
    rest = sum(path.stat().st_size for path in files[listed:])
    assert (f"  and {count - listed} more files, {rest / 1000:.3g} kB; --json lists all\n" in shown.out) == (count > listed)
    assert len(reshard(*arguments, "--overwrite", "--json").document["files"]) == count


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("inspect", "https://huggingface.co/ORG/NAME"), 6, "Give hf://ORG/NAME, or the folder that `hf download ORG/NAME"),
        (("inspect", "https://huggingface.co/ORG/NAME/tree/v2/sub"), 6, "Give hf://ORG/NAME@v2,"),
        (("inspect", "https://hf.co/ORG/NAME/blob/main/config.json"), 6, "Give hf://ORG/NAME,"),
        (("convert", HF / "llama", "/proc/out", "--to", "hf"), 5, "/proc/out: cannot be created: /proc takes no new files"),
    ],
)
def test_a_place_that_cannot_be_read_or_written_is_named(arguments, code, told):
    shown = reshard(*arguments)
    assert shown.code == code and told in shown.err


def test_what_hub_addresses_need_is_one_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    shown = reshard("inspect", "hf://ORG/NAME")
    assert shown.code == 6 and "hf:// paths need fsspec and huggingface_hub" in shown.err and "pip install 'reshard[hub]'" in shown.err


WORKER = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path.insert(0, sys.argv[1])
import pickle
pickle.loads(b"creshard.engine.on_ray\\n_convert_task\\n.")
import reshard.formats.vllm
print(reshard.formats.__file__)
"""


def test_a_worker_of_ray_finds_the_formats_of_a_checkout_that_hides_the_installed_package(tmp_path):
    """Ray puts the driver's folder on the path of its workers, where reshard/ of a checkout is found before the installed package."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-P", "-c", WORKER, root], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == root / "formats" / "__init__.py"


def test_a_checkout_runs_without_an_installation():
    root = Path(__file__).parents[2]
    libraries = {**os.environ, "PYTHONPATH": str(Path(click.__file__).parents[1])}
    command = [sys.executable, "-S", "-m", "reshard", "inspect", "fixtures/hf/llama"]
    done = subprocess.run(command, cwd=root, env=libraries, capture_output=True, text=True)
    assert done.returncode == 0 and "llama" in done.stdout, done.stderr


def test_a_checkout_without_its_libraries_says_what_to_do():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-S", "-m", "reshard", "--version"], cwd=root, capture_output=True, text=True)
    assert (
        done.returncode == 2 and "not an installed package. Run `pip install -e .` here" in done.stderr and "Traceback" not in done.stderr
    )
