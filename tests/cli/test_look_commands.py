"""diff, stats, cat and export on real checkpoints, against plain torch and numpy on the whole tensors."""

from __future__ import annotations

import json
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.fixture_places import DCP, FIXTURES, FSDP, HF
from helpers.reshard_command import reshard
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import reshard as library
from reshard.verbs.look.diff import MEASURES

LLAMA, FSDP2 = HF / "llama", DCP / "fsdp2"
MODEL = ("--model", FSDP2 / "model")
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def trained(tmp_path):
    """The llama fixture after a step that changed one matrix, and a norm by one ULP in one element."""
    target = tmp_path / "after"
    shutil.copytree(LLAMA, target)
    (file,) = target.glob("*.safetensors")
    weights = load_file(file)
    weights[UP] = (weights[UP].float() * 1.01).bfloat16()
    weights["model.norm.weight"].view(torch.int16)[5] += 1
    save_file(weights, file, metadata={"format": "pt"})
    return target


def original():
    return load_file(next(LLAMA.glob("*.safetensors")))


def test_diff_tells_what_torch_computes(trained):
    result = reshard("diff", LLAMA, trained, "--json", "--full")
    document = result.document
    assert result.code == 1 and not document["equal"] and document["tensors"] == 21
    changes = {each["name"]: each for each in document["changes"]}
    assert {name for name, each in changes.items() if each["changed"]} == {UP, "model.norm.weight"}
    before, after = original()[UP].double(), load_file(next(trained.glob("*.safetensors")))[UP].double()
    change, d = changes[UP], after - before
    assert change["changed"] == int((d != 0).sum()) and change["elements"] == d.numel()
    assert change["largest"] == pytest.approx(float(d.abs().max())) and change["mean"] == pytest.approx(float(d.abs().mean()), rel=1e-5)
    assert change["relative"] == pytest.approx(float(d.norm() / before.norm()), rel=1e-5)
    assert (change["layer"], change["role"]) == (1, "mlp.up")
    norm = changes["model.norm.weight"]
    assert (norm["changed"], norm["ulps"], norm["layer"]) == (1, [31, 1], None)
    layers = {each["name"]: each for each in document["layers"]}
    assert layers["layer 0"]["changed"] == 0 and layers["layer 1"]["changed"] == change["changed"] and layers["no layer"]["changed"] == 1
    assert document["roles"][0]["role"] == "mlp.up", "the largest relative change comes first"


def test_diff_shows_the_largest_change_first(trained):
    result = reshard("diff", LLAMA, trained)
    assert result.code == 1 and result.out.startswith("different: 21 tensors, 148 kB compared; 2 of 21 tensors changed\n")
    assert result.out.index(UP) < result.out.index("model.norm.weight")
    assert "and 1 more; --limit 0 shows all" in reshard("diff", LLAMA, trained, "--limit", 1).out


def test_diff_says_nan_and_infinity_first(tmp_path):
    """One NaN in a tensor of 8,192 elements was listed with an innocent number, and no word."""
    shutil.copytree(LLAMA, tmp_path / "broken")
    (file,) = (tmp_path / "broken").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, word in (("model.layers.0.mlp.up_proj.weight", b"\x80\xff"), ("model.layers.1.self_attn.q_proj.weight", b"\xc1\x7f")):
        start = 8 + length + header[name]["data_offsets"][0]
        data[start : start + 2] = word
    file.write_bytes(data)
    said = [
        "1 tensor has NaN on the right: 1 element, such as in model.layers.1.self_attn.q_proj.weight",
        "1 tensor has infinity on the right: 1 element, such as in model.layers.0.mlp.up_proj.weight",
    ]
    result = reshard("diff", LLAMA, tmp_path / "broken", "--html", tmp_path / "page.html")
    assert result.out.splitlines()[:2] == said and "NaN, inf" in result.out
    assert result.out.splitlines()[-1].startswith(f"  page      {tmp_path / 'page.html'}, ")
    page = (tmp_path / "page.html").read_text()
    assert all(sentence in page for sentence in said) and page.index(said[0]) < page.index("2 differences")
    assert reshard("diff", LLAMA, tmp_path / "broken", "--threshold", 0.5, "-q").out.splitlines()[:2] == said
    row = {"what": "nan", "side": "right", "elements": 1, "tensors": 1, "first": "model.layers.1.self_attn.q_proj.weight"}
    assert reshard("diff", LLAMA, tmp_path / "broken", "--json").document["not_finite"][0] == row
    # Equal NaN are equal, and still said.
    same = reshard("diff", tmp_path / "broken", tmp_path / "broken")
    assert same.code == 0 and "has NaN on the left" in same.out and "equal: 21 tensors" in same.out
    assert "NaN" not in reshard("diff", LLAMA, LLAMA).out


def test_diff_of_equal_checkpoints_in_different_layouts(tmp_path):
    out = tmp_path / "out"
    assert reshard("convert", FSDP2 / "checkpoint", out, "--to", "vllm", "--tp", 2, *MODEL).code == 0
    result = reshard("diff", FSDP2 / "checkpoint", out, "--json", "--full")
    assert result.code == 0 and result.document["equal"]
    assert {each["changed"] for each in result.document["changes"]} == {0} and len(result.document["changes"]) == result.document["tensors"]


@pytest.mark.parametrize(
    "threshold, code",
    [("0.02", 0), ("0.005", 1), ("relative=0.005", 1), ("ulps=1", 1), ("ulps=4", 0), ("changed=1", 0), ("changed=0.01", 1)],
)
def test_a_threshold_is_a_gate(trained, threshold, code):
    result = reshard("diff", LLAMA, trained, "--threshold", threshold, "--json")
    assert result.code == code and bool(result.document["beyond_threshold"]) == bool(code)


def test_a_threshold_is_exact_and_each_of_several_counts(trained):
    relative = library.diff(LLAMA, trained).largest()[0].relative
    for factor, code in ((0.999, 1), (1.001, 0)):
        assert reshard("diff", LLAMA, trained, "--threshold", relative * factor).code == code
        assert reshard("diff", LLAMA, trained, "--threshold", relative * factor, "--threshold", "largest=1e9").code == code


def test_a_threshold_does_not_forgive_a_missing_tensor_or_a_nan(trained):
    (file,) = trained.glob("*.safetensors")
    weights = load_file(file)
    weights[UP][0, 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    for measure in MEASURES.keys() - {"changed", "ulps"}:
        assert reshard("diff", LLAMA, trained, "--threshold", f"{measure}=1e9").code == 1
    del weights[UP]
    save_file(weights, file, metadata={"format": "pt"})
    result = reshard("diff", LLAMA, trained, "--threshold", "1e9")
    assert result.code == 1 and "missing" in result.out


def test_a_threshold_that_means_nothing_is_an_error():
    assert "there is no measure 'ulp'" in reshard("diff", LLAMA, LLAMA, "--threshold", "ulp=1").err
    assert "'much' is not a number" in reshard("diff", LLAMA, LLAMA, "--threshold", "much").err
    assert "--headers reads none" in reshard("diff", LLAMA, LLAMA, "--threshold", "1", "--headers").err


def test_headers_alone_read_no_weight(trained, tmp_path):
    (file,) = trained.glob("*.safetensors")
    length = struct.unpack("<Q", file.read_bytes()[:8])[0]
    size = file.stat().st_size
    with file.open("r+b") as opened:  # the header stays, the weights become a hole
        opened.truncate(8 + length)
        opened.truncate(size)
    result = reshard("diff", LLAMA, trained, "--headers")
    assert result.code == 0 and "no weight was read" in result.out
    assert reshard("diff", LLAMA, trained).code == 1
    assert reshard("diff", LLAMA, HF / "qwen3", "--headers").code == 1


def test_diff_of_two_element_types(tmp_path):
    assert reshard("convert", LLAMA, tmp_path / "wide", "--to", "hf", "--dtype", "fp32").code == 0
    result = reshard("diff", LLAMA, tmp_path / "wide", "--json", "--full")
    assert result.code == 0 and {each["changed"] for each in result.document["changes"]} == {0}
    assert reshard("diff", LLAMA, tmp_path / "wide", "--headers").code == 1


def test_diff_in_python(trained):
    result = library.diff(LLAMA, trained)
    assert not result.equal and [each.name for each in result.largest()] == [UP, "model.norm.weight"]
    with pytest.raises(library.DifferenceFound, match="elements differ"):
        result.raise_if_different()


def test_stats_are_those_of_torch():
    rows = {row.name: row for row in library.stats(LLAMA)}
    for name, tensor in original().items():
        row, values = rows[name], tensor.double()
        assert (row.smallest, row.largest, row.zeros) == (float(values.min()), float(values.max()), int((values == 0).sum()))
        assert row.mean == pytest.approx(float(values.mean()), abs=1e-9)
        assert row.deviation == pytest.approx(float(values.std(correction=0)), rel=1e-6)
        assert sum(row.histogram) == row.elements and row.shape == tuple(tensor.shape)


def test_stats_of_a_sharded_checkpoint_are_those_of_the_whole_tensors(tmp_path):
    out = tmp_path / "out"
    assert reshard("convert", LLAMA, out, "--to", "vllm", "--tp", 2).code == 0
    assert library.stats(LLAMA, "*q_proj*").tensors == library.stats(out, "*q_proj*").tensors


def test_stats_find_what_is_strange(trained):
    (file,) = trained.glob("*.safetensors")
    weights = load_file(file)
    weights[UP][3, 4] = float("inf")
    weights[UP][7] = 0.25
    save_file(weights, file, metadata={"format": "pt"})
    result = reshard("stats", trained, "--sort", "nan", "--limit", 1)
    assert "1 with NaN or infinite values" in result.out and UP in result.out and "and 20 more" in result.out
    (row,) = reshard("stats", trained, UP, "--json").document["tensors"]
    assert (row["inf"], row["constant_rows"], row["nan"]) == (1, 1, 0)
    assert "matches none of 21 tensor names" in reshard("stats", trained, "*nrom*").err


def test_stats_of_optimizer_state_are_asked_for():
    arguments = ("stats", FIXTURES / "deepspeed" / "z2-bf16-3" / "checkpoint", "--json")
    kinds = {row["kind"] for row in reshard(*arguments, "--optimizer").document["tensors"]}
    assert {"moment1", "moment2"} <= kinds
    assert not {"moment1", "moment2", "step"} & {row["kind"] for row in reshard(*arguments).document["tensors"]}


def test_cat_prints_the_values():
    result = reshard("cat", LLAMA, UP, "--slice", "2:4,-3:", "--json")
    assert result.document["values"] == original()[UP][2:4, -3:].tolist()
    assert reshard("cat", LLAMA, UP).out.startswith(f"{UP}[:8,:8]  BF16 [8, 8] of [88, 32]\n")
    assert "model.norm.weight  BF16 [32]" in reshard("cat", LLAMA, "model.norm.weight").out
    assert "Did you mean model.norm.weight?" in reshard("cat", LLAMA, "model.norn.weight").err
    assert "index 99 of an axis of size 88" in reshard("cat", LLAMA, UP, "--slice", "99").err
    assert reshard("cat", LLAMA, UP, "--slice", "x").code == 2


def test_cat_reads_only_the_slice(monkeypatch):
    from reshard.storage.files import LocalFiles

    read, read_into = [], LocalFiles.read_into

    def counted(self, path, byte_offset, buffer):
        read.append(len(buffer))
        return read_into(self, path, byte_offset, buffer)

    tensor = library.open(LLAMA)["lm_head.weight"]
    monkeypatch.setattr(LocalFiles, "read_into", counted)
    tensor[10:12].words()
    assert sum(read) == 2 * 32 * 2


def test_export_writes_what_other_programs_read(tmp_path):
    assert reshard("export", FSDP2 / "checkpoint", "*.layers.0.*", "-o", tmp_path / "x.safetensors", *MODEL).code == 0
    whole = library.open(FSDP2 / "checkpoint", model=FSDP2 / "model")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(whole.tensors("*.layers.0.*"))
        assert all(torch.equal(file.get_tensor(name), whole[name].torch()) for name in file.keys())  # noqa: SIM118
    result = reshard("export", LLAMA, UP, "--slice", ":5", "-o", tmp_path / "x.npy")
    assert "view(ml_dtypes.bfloat16)" in result.out
    array = np.load(tmp_path / "x.npy").view(ml_dtypes.bfloat16)
    assert np.array_equal(array.astype(np.float32), original()[UP][:5].float().numpy())
    assert "the file exists" in reshard("export", LLAMA, UP, "-o", tmp_path / "x.npy").err
    assert reshard("export", LLAMA, UP, "-o", tmp_path / "x.npy", "--overwrite").code == 0
    assert "holds one tensor" in reshard("export", LLAMA, "*norm*", "-o", tmp_path / "y.npy").err
    assert "names no form" in reshard("export", LLAMA, UP, "-o", tmp_path / "y.pt").err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "x.safetensors"]


def test_a_checkpoint_is_a_mapping_of_lazy_tensors():
    ckpt, weights = library.open(LLAMA), original()
    assert len(ckpt) == 21 and set(ckpt) == set(weights) and UP in ckpt and "x" not in ckpt and bool(ckpt)
    assert torch.equal(ckpt[UP].torch(), weights[UP]) and ckpt[UP][0:4, :8].shape == (4, 8)
    assert ckpt[UP].numpy().dtype == ml_dtypes.bfloat16
    assert sorted(ckpt.tensors("*.q_proj*")) == ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
    with pytest.raises(KeyError, match=r"Did you mean model\.norm\.weight\?"):
        ckpt["model.nrom.weight"]


@pytest.mark.parametrize("tp, rank", [(1, 0), (2, 1), (4, 3)])
def test_slices_of_a_rank_are_those_of_its_whole_tensors(tp, rank):
    """Fused and interleaved tensors are made of several boxes."""
    count = 0
    for tensor in library.open(HF / "qwen3_moe").view(to="vllm", tp=tp, rank=rank).values():
        whole = tensor.words()
        for key in (np.s_[1:3], np.s_[-1], np.s_[..., 2:5], np.s_[3:40, ..., 1], np.s_[2, 1:2, 0:3])[: 1 + 2 * whole.ndim]:
            try:
                expected = whole[key]
            except IndexError:
                continue
            assert np.array_equal(tensor[key].words(), expected), (tensor, key)
            count += 1
    assert count > 50


def test_documents_are_json_even_for_numbers_that_json_lacks(trained):
    (file,) = trained.glob("*.safetensors")
    weights = load_file(file)
    weights[UP][0, 0] = float("nan")
    weights[UP][0, 1] = float("-inf")
    save_file(weights, file, metadata={"format": "pt"})
    for arguments in (("cat", trained, UP), ("stats", trained), ("diff", LLAMA, trained, "--full")):
        json.loads(reshard(*arguments, "--json").out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_what_a_file_says_cannot_begin_a_line_of_its_own(tmp_path):
    """A tensor's name holds a line that looks like an error of reshard, and a sequence that clears the screen."""
    forged = "a\nreshard: everything is lost. [defect]\x1b[2J\x85\u2028"
    a, b, target = tmp_path / "a", tmp_path / "b", tmp_path / "t"
    for folder, value in ((a, 0), (b, 1)):
        folder.mkdir()
        save_file({forged: torch.full((2, 2), float(value))}, folder / "model.safetensors")
    (target / ".reshard").mkdir(parents=True)
    (target / ".reshard" / "lock").write_text(json.dumps({"host": forged, "pid": 1, "command": forged, "since": forged}))
    lines = [("cat", a, forged), ("inspect", a), ("inspect", a, "--tensor", "*"), ("stats", a), ("diff", a, b), ("explain", a, b)]
    lines += [
        ("export", a, forged, "-o", tmp_path / "e.npy"),
        ("verify", a, b),
        ("doctor", a),
        ("plan", a, "--to", "dcp"),
        ("clean", target),
    ]
    for line in lines:
        result = reshard(*line)
        printed = result.out + result.err
        assert "everything is lost" in printed or line[0] in ("export", "doctor", "plan", "clean"), line
        assert "\nreshard: everything" not in printed and printed.replace("\n", "").isprintable(), line


def test_the_tree_counts_weights_and_says_what_each_has_besides():
    rows = {line.split()[0]: line for line in reshard("inspect", DCP / "fsdp2" / "checkpoint").out.splitlines() if " x4" in line}
    assert "  1 x4 " in rows["embed_tokens.weight"] and "  2 x4 " in rows["q_proj.weight"], "one weight, two moments, a step count"
    plain = next(line for line in reshard("inspect", LLAMA).out.splitlines() if "q_proj.weight" in line)
    assert plain.split()[1] == "2"


def test_copies_are_counted_as_copies():
    line = next(line for line in reshard("inspect", FSDP / "hsdp" / "checkpoint").out.splitlines() if "q_proj" in line)
    assert "2 along axis 0, 2 copies" in line, "two replicas of two shards: four pieces"


def test_the_first_line_says_experts_and_quantization():
    assert "(25,476 active; 8 experts, top 2)" in reshard("inspect", HF / "qwen3_moe").out.splitlines()[0]
    assert "GPTQ" in reshard("inspect", FIXTURES / "hf_packed" / "llama-gptq").out.splitlines()[0]


def test_numbers_are_said_once(tmp_path):
    shutil.copy(LLAMA / "config.json", tmp_path / "70b.json")
    assert reshard("estimate", tmp_path / "70b.json").out.splitlines()[0] == "74,016 parameters on 1 GPU: one rank"
    assert "lacks 58.83 kB" in reshard("degrees", LLAMA / "config.json", "--gpu-memory", "100KB", "--reserve", 0, "--tp", 1).out
    assert "  format " in reshard("formats").out.splitlines()[0]


@pytest.mark.parametrize("command", ["inspect", "doctor", "convert"])
def test_a_missing_tokenizer_is_said(tmp_path, command):
    folder = tmp_path / "bare"
    folder.mkdir()
    for path in (*LLAMA.glob("*.safetensors"), LLAMA / "config.json"):
        shutil.copy(path, folder)
    more = (tmp_path / "out", "--to", "vllm", "--dry-run") if command == "convert" else ()
    assert "tokenizer (tokenizer.json, tokenizer.model, ...)" in reshard(command, folder, *more).out


def test_a_tensor_is_named_with_its_slice_as_in_python():
    shown = reshard("cat", HF / "llama", "model.norm.weight[0:2]")
    assert shown.code == 0 and shown.out == reshard("cat", HF / "llama", "model.norm.weight", "--slice", "0:2").out
    assert "Known: model.layers.0.self_attn.q_proj.weight, model.layers.1" in reshard("cat", HF / "llama", "q_proj").err


def test_what_other_tools_call_an_option_is_said_in_words_of_reshard():
    assert "Give --tp and --pp" in reshard("degrees", "llama-3-8b", "--gpus", 8).err
    assert "Give the names as arguments" in reshard("stats", HF / "llama", "--include", "*q*").err
    assert "Did you mean --step latest?" in reshard("inspect", FIXTURES / "delta", "--step", "lastest").err
