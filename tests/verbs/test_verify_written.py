"""`verify DST` finds every flipped bit in what reshard wrote, and names missing and added files.

One output of each written format, with optimizer state, replicas and padding where the format has them. The bits are flipped one at a time
in every region of every file; the regions are found by the plan, the check knows only the files.
"""

import random

import pytest
from helpers.fixture_places import FIXTURES, HF
from helpers.reshard_command import reshard

import reshard as library
from reshard.plans.manifest import CHECKSUMS, DIGESTS, fixed_ranges

FSDP2 = FIXTURES / "dcp" / "fsdp2"
ADAPTER = FIXTURES / "peft" / "fsdp2"
NANOTRON = FIXTURES / "nanotron" / "llama-tp2-pp2"
TIED = FIXTURES / "dcp" / "fsdp2-tied"

# Target -> the source and the options: state, replicas (norms at TP 2), padding (a vocabulary that TP does not divide).
OUTPUTS = {
    "hf": (FSDP2, {}),
    "dcp": (FSDP2, {"optimizer": True, "dp": 2}),
    "fsdp": (FSDP2, {"optimizer": True, "dp": 3}),
    "deepspeed": (FSDP2, {"dp": 2}),
    "universal": (FSDP2, {}),
    "megatron": (FSDP2, {"optimizer": True, "tp": 2}),
    "megatron-dist": (FSDP2, {"optimizer": True, "tp": 2}),
    "fsdp-dtensor": (FSDP2, {"optimizer": True, "dp": 2}),
    "vllm": (FSDP2, {"tp": 2}),
    "sglang": (FSDP2, {"tp": 2}),
    "trtllm": (FSDP2, {"tp": 2}),
    "consolidated": (FSDP2, {"tp": 2, "embedding_cut": "rows"}),
    "nanotron": (NANOTRON, {"tp": 2, "model": None}),
    "peft": (ADAPTER, {"lora_alpha": "6", "base_model": "x", "task_type": "CAUSAL_LM", "model": HF / "qwen3_moe-sparse"}),
}


@pytest.fixture(scope="module")
def without_samples():
    """The samples cover a small file whole, and would find what the other checks miss."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reshard.engine.record.sample_ranges", lambda nbytes: ())
        yield


@pytest.fixture(scope="module", params=OUTPUTS)
def written(request, tmp_path_factory, without_samples):
    """The plan of an output, its folder, and the option that gives the config where the folder holds none."""
    case, options = OUTPUTS[request.param]
    model = options.get("model", case / "model")
    plan = library.plan(case / "checkpoint", to=request.param, **{**options, "model": model})
    folder = tmp_path_factory.mktemp("written") / "out"
    library.convert(plan, folder, workers=1, checksums=True)
    return plan, folder, () if model is None or (folder / "config.json").exists() else ("--model", model)


def test_every_written_format_is_tried():
    from reshard.adapter import registry

    assert {name for name, each in registry.formats().items() if each.can_write} == OUTPUTS.keys()


def test_an_output_is_as_written(written):
    _, folder, model = written
    result = reshard("verify", folder, *model)
    assert result.code == 0 and "note" not in result.out, result.out + result.err
    assert reshard("fingerprint", folder, *model).code == 0


def regions(plan, folder):
    """Region -> places (path, byte) in it."""
    found = {}
    kinds = {route.name: "optimizer" if route.name.startswith("optim.") else "weight" for route in plan.routes}
    constants = {}
    for constant in plan.target_index.constants:
        constants.setdefault(constant.path, []).append(constant)
        found.setdefault("constant", []).append((constant.path, constant.byte_offset, constant.byte_offset + constant.nbytes))
    for file in plan.layout.files:
        for start, stop in fixed_ranges(file, constants.get(file.path, ())):
            found.setdefault("fixed", []).append((file.path, start, stop))
    for route in plan.routes:
        seen = set()
        for piece in route.target.pieces():
            first, kind = piece.byte_offset_of(piece.box), kinds[route.name]
            found.setdefault(f"{kind}, replica" if piece.box in seen else kind, []).append(
                (piece.extent.path, first, first + (route.target.dtype.itemsize if piece.box.volume else 0))
            )
            seen.add(piece.box)
    for path in (*(sidecar.path for sidecar in plan.layout.sidecars), DIGESTS, CHECKSUMS):
        found.setdefault("small file", []).append((path, 0, (folder / path).stat().st_size))
    return {region: [place for place in places if place[1] < place[2]] for region, places in found.items()}


def test_a_flipped_bit_is_found_wherever_it_is(written):
    plan, folder, model = written
    chosen = random.Random(0)
    for region, places in regions(plan, folder).items():
        for path, start, stop in chosen.sample(places, min(6, len(places))):
            at, bit = chosen.randrange(start, stop), 1 << chosen.randrange(8)
            content = (folder / path).read_bytes()
            (folder / path).write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
            result = reshard("verify", folder, *model)
            (folder / path).write_bytes(content)
            assert result.code == 1, f"{region}: byte {at} of {path}: {result.out}{result.err}"
            assert path in result.out, f"{region}: byte {at} of {path}: {result.out}"
    assert reshard("verify", folder, *model).code == 0
