"""What training needs: the numbers of the papers, simulations of rings and pipelines, and what real Megatron ranks hold."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from helpers.fixture_places import FIXTURES, HF, MODELS, stored
from helpers.published_configs import DEEPSEEK_V3, DEEPSEEK_V3_OF_4_LAYERS, GPT2, LLAMA_8B, LLAMA_70B, MIXTRAL, parameters_of_deepseek_v3

import reshard
from reshard.containers import torch_zip
from reshard.errors import RequestError
from reshard.geometry.meshes import Parallel
from reshard.models.lookup import find_model
from reshard.storage.files import LocalFiles
from reshard.training.activations import RECOMPUTE, Batch, embedding_bytes, has_dropout, head_bytes, itemised, published
from reshard.training.memory import BytesPer, all_reduce_bytes, gathered_bytes
from reshard.training.parameter_counts import layer_parts, parameters, stages_of_model
from reshard.training.schedules import PipelineSchedule

GB = 10**9


def states(found):
    return [strategy.fullest.states for strategy in found.strategies]


@pytest.mark.parametrize(
    "billions, expected", [(7, [112, 38.5, 26.25, 14]), (10, [160, 55, 37.5, 20])], ids=["7 B on 8 GPUs", "10 B on 8 GPUs"]
)
def test_zero_divides_sixteen_bytes_per_parameter_as_published(billions, expected):
    found = reshard.estimate(billions * GB, gpus=8)
    assert [s.zero for s in found.strategies] == [0, 1, 2, 3]
    assert states(found) == [int(gigabytes * GB) for gigabytes in expected]


def test_the_papers_figure_of_7_5_billion_on_64_ranks():
    """Rajbhandari et al., figure 1: 120, 31.4, 16.6 and 1.9 GB."""
    assert [round(each / GB, 1) for each in states(reshard.estimate(7_500_000_000, gpus=64))] == [120, 31.4, 16.6, 1.9]


def test_what_is_assumed_of_bytes_is_an_option_and_is_said():
    found = reshard.estimate(GB, dp=4, zero=1, bytes_per=BytesPer(weight=4, gradient=4, master=0, moment=4, moments=2))
    assert states(found) == [(4 + 4) * GB + 8 * GB // 4]
    assert "4 weight + 4 gradient + 0 master + 2 x 4 moments = 16" in found.assumptions[0]


@pytest.mark.parametrize(
    "config, count",
    [(LLAMA_70B, 70_553_706_496), (LLAMA_8B, 8_030_261_248), (MIXTRAL, 46_702_792_704), (GPT2, 124_439_808)],
    ids=["Llama-3-70B", "Llama-3-8B", "Mixtral-8x7B", "GPT-2"],
)
def test_a_config_says_the_published_number_of_parameters(config, count):
    assert parameters(find_model(config)) == count


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_holds_what_the_file_holds(name):
    model = find_model(json.loads((HF / name / "config.json").read_text()))
    elements = sum(math.prod(shape) for _, shape, _ in stored(HF / name / "model.safetensors").values())
    (stage,) = stages_of_model(model, Parallel())
    assert stage.weights.total == parameters(model) == elements


# Cases whose stages are not as equal as can be, with the layers that they were trained with. Left out of all: experts with a
# tensor-parallel size of their own, layers that predict further tokens, and MLA in the local implementation, which divides q_a and kv_a.
UNEVEN = {"llama-uneven": (1, 2, 1), "llama-embedding-counts": (1, 2, 1), "llama-layout": (3, 1)}
MEGATRON = sorted(
    path.parent.name
    for path in (FIXTURES / "megatron").glob("*/model")
    if path.parent.name not in {"mixtral-etp1", "deepseek3-mtp", "deepseek3"}
)
assert len(MEGATRON) >= 18


@pytest.mark.parametrize("case", MEGATRON)
def test_every_rank_holds_what_a_real_megatron_rank_saved(case):
    """Tensor-, pipeline- and expert-parallel ranks, tied heads, padded vocabularies: weights counted in the files themselves."""
    folder = FIXTURES / "megatron" / case
    ranks = {}
    for path in sorted((folder / "checkpoint").rglob("model_optim_rng.pt")):
        content = torch_zip.read(LocalFiles(path.parent), path.name, locate=False)
        tensors = (value for key in content if key.startswith("model") for value in content[key].values() if hasattr(value, "shape"))
        ranks[path.parent.name] = sum(math.prod(tensor.shape) for tensor in tensors)
        args = content["args"].state
    tp, pp, ep = (args[f"{name}_model_parallel_size"] for name in ("tensor", "pipeline", "expert"))
    model = find_model(json.loads((folder / "model" / "config.json").read_text()))
    sizes = Parallel(tp, pp, ep, dp=ep)
    found = stages_of_model(model, sizes, UNEVEN.get(case), args["make_vocab_size_divisible_by"])
    # mp_rank_TT[_PPP][_EEE]
    expected = {name: found[int(name.split("_")[3]) if pp > 1 else 0].weights.total for name in ranks}
    assert len(ranks) > 1 or tp * pp == 1
    assert ranks == expected


@pytest.mark.parametrize("config", [LLAMA_70B, MIXTRAL, DEEPSEEK_V3_OF_4_LAYERS], ids=["llama", "mixtral", "deepseek"])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_stages_add_up_to_the_model(config, pp):
    model = find_model(config)
    assert sum(stage.weights.total for stage in stages_of_model(model, Parallel(pp=pp))) == parameters(model)


def test_a_model_whose_release_is_quantized_is_trained_as_values():
    """FP8 with scales per block cuts nothing smaller, and scales are no parameters: DeepSeek-V3 with TP 32, 576 rows of an MLP per rank."""
    model = DEEPSEEK_V3_OF_4_LAYERS
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    released = find_model({**model, "quantization_config": quantized})
    found = reshard.estimate(released, tp=32, gpus=64, ep=2, zero=1)
    assert found == reshard.estimate(find_model(model), tp=32, gpus=64, ep=2, zero=1)
    assert found.parameters == parameters_of_deepseek_v3(4)


def test_the_parameters_of_deepseek_v3_are_those_of_its_paper():
    assert parameters(find_model(DEEPSEEK_V3)) == parameters_of_deepseek_v3(61) == 671_026_419_200


def test_layers_that_are_left_over_go_to_the_first_stages():
    """DeepSpeed 0.19.8, runtime/utils.py: partition_uniform(61, 4) is [0, 16, 31, 46, 61]."""
    stages = stages_of_model(find_model(DEEPSEEK_V3), Parallel(pp=4))
    assert [stage.layers for stage in stages] == [range(16), range(16, 31), range(31, 46), range(46, 61)]
    own = stages_of_model(find_model(DEEPSEEK_V3), Parallel(pp=4), (13, 16, 16, 16))
    assert own[0].layers == range(13) and own[0].weights.total < stages[0].weights.total


def test_experts_divide_by_ep_and_their_state_by_fewer_ranks():
    """Mixtral on 16 ranks, EP 8: each has one expert of eight per layer, which two ranks share; the rest is shared by all 16."""
    experts = 32 * 8 * 3 * 4096 * 14336
    dense = 46_702_792_704 - experts
    ddp, _, _, zero3 = reshard.estimate(find_model(MIXTRAL), gpus=16, ep=8).strategies
    assert ddp.fullest.weights == 2 * (dense + experts // 8)
    assert zero3.fullest.states == 16 * (dense // 16 + experts // 8 // 2)
    assert (ddp.traffic.gradients, ddp.traffic.weights) == (2 * (dense * 2 * 15 // 16) + 2 * (experts // 8 * 2) // 2, 0)


@pytest.mark.parametrize(
    "sizes, words",
    [
        ({"tp": 3}, "3 ranks do not divide its 64 attention heads"),
        ({"pp": 81}, "80 layers"),
        ({"ep": 2, "dp": 2}, "no experts"),
        ({"gpus": 12, "tp": 8}, "12 GPUs are not TP 8"),
        ({"pp": 2, "stage_layers": (40, 41)}, "81 layers"),
        ({"pp": 4, "vp": 3, "schedule": "interleaved", "microbatches": 4}, "does not divide the 20 layers"),
        ({"vp": 2}, "`vp=2`"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(sizes, words):
    with pytest.raises(RequestError) as raised:
        reshard.estimate(find_model(LLAMA_70B), **sizes)
    assert words in str(raised.value)


# Activations: Korthikanti et al. 2022.


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_layer_keeps_what_the_papers_table_says(tp, sequence_parallel):
    """Table 2, for the 22 B model: s = 2048, b = 4, h = 6144, a = 64."""
    model = find_model({**GPT2, "n_embd": 6144, "n_head": 64})
    s, b, h, a, t = 2048, 4, 6144, 64, tp
    sbh = s * b * h
    linear, scores = Fraction(34, t) if sequence_parallel else 10 + Fraction(24, t), Fraction(5 * a * s, h * t)
    expected = {"none": sbh * (linear + scores), "selective": sbh * linear, "full": 2 * sbh / (t if sequence_parallel else 1)}
    for recompute in RECOMPUTE:
        batch = Batch(s, b, tp, sequence_parallel, recompute)
        assert published(model).nbytes(batch) == expected[recompute]
    assert published(model).nbytes(Batch(s, b, tp, sequence_parallel, scores=False)) == expected["selective"]


def test_counted_tensor_by_tensor_a_gpt_keeps_what_the_formula_says():
    model = find_model(GPT2)
    assert has_dropout(model)
    for layer in layer_parts(model):
        assert itemised(model, layer) == published(model)


def test_counted_tensor_by_tensor_a_gated_mlp_and_few_kv_heads_keep_their_own_widths():
    """Llama-3-8B, without dropout, in elements per token: the inputs of 2 norms, of qkv and of gate and up, that is 4 h; q, k, v and the
    input of o; gate, up and the input of down."""
    kept = itemised(find_model(LLAMA_8B), layer_parts(find_model(LLAMA_8B))[0])
    assert (kept.whole, kept.divided) == (2 * 4 * 4096, 2 * (4096 + 2 * 1024 + 4096 + 3 * 14336))
    assert kept.scores == 2 * 32


def test_counted_tensor_by_tensor_experts_keep_the_tokens_sent_to_them():
    model = find_model(MIXTRAL)
    kept = itemised(model, layer_parts(model)[0])
    assert kept.divided == 2 * (4096 + 2 * 1024 + 4096 + 2 * 3 * 14336)
    assert kept.whole == 2 * (2 * 4096 + 4096 + (4096 + 8) + 2 * 4096)  # norms, qkv, router and its scores, experts


def test_a_stage_keeps_its_layers_for_all_microbatches_in_flight():
    """The paper's equations: s b h L (34 + 5 a s / h) on the first stage, whatever the number of stages; interleaved 1 + (p - 1) / (p m)
    of it."""
    config = {**GPT2, "n_layer": 16}
    model = find_model(config)
    batch = Batch(1024)
    whole = 16 * published(model).nbytes(batch)

    def first(in_flight, **options):
        options |= {"activations": "published", "flash_attention": False}
        nbytes = reshard.estimate(model, pp=4, seq_len=1024, zero=0, **options).strategies[0].stages[0].activations
        return nbytes - math.ceil(in_flight) * embedding_bytes(model, batch)

    assert first(4, microbatches=8) == whole
    assert first(8, microbatches=8, schedule="gpipe") == 2 * whole
    assert first(5.5, microbatches=8, schedule="interleaved", vp=2) == whole * (1 + Fraction(3, 4 * 2))


def test_the_last_stage_keeps_logits_as_the_paper_says():
    """4 s b h / t (1 + v / h) with sequence parallelism; the vocabulary padded."""
    model = find_model({**GPT2, "vocab_size": 51200})
    assert head_bytes(model, Batch(1024, 2, 4, sequence_parallel=True), 51200 // 4) == 4 * 1024 * 2 * 768 / 4 * (1 + 51200 / 768)


def test_full_recomputation_keeps_inputs_and_needs_one_layer_on_top():
    model = find_model(LLAMA_8B)
    (strategy,) = reshard.estimate(model, zero=0, seq_len=4096, recompute="full", flash_attention=True).strategies
    head = head_bytes(model, Batch(4096), 128256)
    assert strategy.fullest.activations == 32 * 2 * 4096 * 4096 + head
    assert strategy.fullest.transient == 34 * 4096 * 4096 - 2 * 4096 * 4096


# Pipelines, by letting one run.


def simulate(schedule):
    """(makespan, most microbatches held per stage) of a pipeline run by the clock: forward takes 1, backward 2."""
    stages, microbatches = schedule.stages, schedule.microbatches
    orders = []
    for stage in range(stages):
        warmup = microbatches if schedule.name == "gpipe" else min(stages - stage - 1, microbatches)
        order = [("f", m) for m in range(warmup)]
        for m in range(microbatches - warmup):
            order += [("f", warmup + m), ("b", m)]
        orders.append(order + [("b", m) for m in range(microbatches - warmup, microbatches)])
    ends, clocks, held, most = {}, [0] * stages, [0] * stages, [0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            if not order:
                continue
            kind, m = order[0]
            neighbour = stage - 1 if kind == "f" else stage + 1
            needs = (kind, m, neighbour) if 0 <= neighbour < stages else ("f", m, stage) if kind == "b" else None
            if needs is not None and needs not in ends:
                continue
            begin = max(clocks[stage], ends[needs] if needs else 0)
            clocks[stage] = ends[kind, m, stage] = begin + (1 if kind == "f" else 2)
            held[stage] += 1 if kind == "f" else -1
            most[stage] = max(most[stage], held[stage])
            order.pop(0)
    return max(clocks), most


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages, microbatches", [(1, 3), (2, 1), (4, 2), (4, 8), (8, 32), (3, 5)])
def test_a_pipeline_waits_and_holds_as_one_that_runs(name, stages, microbatches):
    schedule = PipelineSchedule(name, stages, microbatches)
    makespan, most = simulate(schedule)
    assert schedule.bubble == 1 - Fraction(3 * microbatches, makespan) == Fraction(stages - 1, microbatches + stages - 1)
    assert [schedule.in_flight(stage) for stage in range(stages)] == most


def test_interleaving_divides_the_wait_by_the_chunks():
    assert PipelineSchedule("interleaved", 4, 8, 2).bubble == Fraction(3, 2 * 8 + 3)
    # Narayanan et al. give it relative to the time without a wait: (P - 1) / (v M).
    waiting = PipelineSchedule("interleaved", 4, 8, 2).bubble
    assert waiting / (1 - waiting) == Fraction(3, 2 * 8)


# Rings, by letting one run.


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_ring_moves_what_is_said(ranks):
    parts = 5
    values = np.arange(ranks * ranks * parts, dtype=np.float64).reshape(ranks, ranks, parts)  # rank, part of its buffer, element
    total, nbytes = values.sum(axis=0), values[0].nbytes
    sent = [0, 0]
    for phase in (0, 1):  # reduce-scatter, then all-gather
        for step in range(ranks - 1):
            moving = {rank: values[rank, (rank - step + phase) % ranks].copy() for rank in range(ranks)}
            sent[phase] += moving[0].nbytes
            for rank, data in moving.items():
                target, part = (rank + 1) % ranks, (rank - step + phase) % ranks
                values[target, part] = data + (values[target, part] if phase == 0 else 0)
    assert all(np.array_equal(values[rank], total) for rank in range(ranks))
    assert sent == [gathered_bytes(nbytes, ranks), gathered_bytes(nbytes, ranks)]
    assert sum(sent) == all_reduce_bytes(nbytes, ranks) == 2 * nbytes * (ranks - 1) // ranks


def test_traffic_and_time_of_a_step():
    """7 B in 16 bits on 8 ranks: 2 M (N - 1) / N = 24.5 GB, half a second over 50 GB per second; ZeRO-3 moves 1.5 times as much."""
    ddp, zero1, zero2, zero3 = (s.traffic for s in reshard.estimate(7 * GB, gpus=8, link=50 * GB).strategies)
    assert ddp.total == zero1.total == zero2.total == 24_500_000_000 and ddp.seconds == 0.49
    assert zero3.total * 2 == ddp.total * 3
    again = reshard.estimate(7 * GB, gpus=8, microbatches=4)
    assert [s.traffic.total for s in again.strategies] == [ddp.total, ddp.total, ddp.total * 5 // 2, 4 * zero3.total]


@pytest.mark.parametrize("said", [{"schedule": "zero-bubble"}, {"recompute": "some"}, {"activations": "measured"}], ids=str)
def test_a_word_that_means_nothing_is_not_taken_for_another(said):
    with pytest.raises(RequestError, match=r"unknown value\..* Known: "):
        reshard.estimate(HF / "llama", gpus=8, pp=2, microbatches=4, seq_len=8, **said)
