"""The slow check of learned layouts: what vLLM's own loader says, against declarations and against real ranks.

    python tests/serving/learned.py [--long] [--reshard PATH] [--python PATH]

1. For every declared model (the small ones of fixtures/hf and fixtures/vllm_declared): the layout that is learned at TP 2 gives the same
   elements as the declaration, on all ranks; with --long at all degrees at which real ranks were compared. Where a version of vLLM has
   other names, the row to add is printed.
2. Tiny models of many kinds of loaders, saved by transformers (tiny_models.py): files converted by a learned layout hold what real ranks
   hold, at TP 1 and 2, bit for bit. So do those of `convert --learn`, for a type without a declaration.
3. A layout of TP 1, 2 and 4 covers TP 8, and equals the layout that is traced there.
4. With --long: every type that tiny_models.py makes is traced at TP 1 and 2. At least 70 types are, and the rows of
   docs/reference/traced-models.md are printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parents[1] / "fixtures"
sys.path[:0] = [str(HERE), str(HERE.parent), str(FIXTURES), str(FIXTURES / "vllm_declared")]

import named_weights  # noqa: E402
from check import HF, VLLM, asked, held, installed, served  # noqa: E402
from helpers.asked_process import Ask  # noqa: E402
from helpers.fixture_places import ranks  # noqa: E402
from helpers.framework_environments import LONG, run_checks  # noqa: E402
from helpers.rank_contents import described, laid_out, our_value, sizes_of  # noqa: E402
from recipes import READ_AS  # noqa: E402
from tiny_models import TYPES  # noqa: E402

from reshard.geometry.meshes import Parallel  # noqa: E402
from reshard.models.lookup import built_in_model_types, find_architecture, find_model  # noqa: E402
from reshard.models.model import Model  # noqa: E402
from reshard.models.quantization import quantization_settings  # noqa: E402
from reshard.serving.learned.learn import LearnedLayout, learned_layout, traced_rank  # noqa: E402
from reshard.verbs.look.learn import config_of, tracer_of, write_layout  # noqa: E402

DECLARED = (
    *("llama", "llama-tied", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "deepseek_v3", "gpt2", "gpt_neox", "gemma2", "phi3"),
    *("qwen2_moe", "deepseek_v2", "llama-biased"),
)
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "qwen2_moe", "deepseek_v2")
# One for each kind of loader: fused and stacked experts, convolutions, segments of one tensor, vLLM's Transformers backend.
UNDECLARED = ("gpt_oss", "qwen3_next", "gemma3_text", "glm4_moe", "granite", "lfm2", "olmo2")
if LONG:
    UNDECLARED = (
        *UNDECLARED,
        *("phi", "cohere2", "exaone4", "stablelm", "starcoder2", "seed_oss", "llama4_text", "minimax_m2", "granitemoe", "bloom"),
    )
WITHOUT_DECLARATION = "ministral"
UNTRACED = {
    "isaac": "its class asks for the tokenizer that was published with it",
    **dict.fromkeys(("deepseek_ocr", "deepseek_ocr2", "deepseek_vl_v2", "molmo"), "the sizes of its tower are those of its class"),
    **dict.fromkeys(("molmo2", "step3p7"), "its config is read by code of the checkpoint"),
    "glm5_next_text": "its reference is quantized; glm5_next contains the language model",
    "qwen4_exp_text": "it was not compared; qwen4_exp contains the language model",
    "minicpmo": "no config class of vLLM's reads its config",
}
# vLLM's own class fails where ranks share two KV heads.
TWO_SIZES = ("gpt_oss",)
Sizes = dict[str, int]


def checks(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Each check as (what, passed, detail)."""
    yield from declared(python, work)
    yield from undeclared(reshard, python, work)
    if LONG:
        yield from all_types(python, work)


def all_types(python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Every type that transformers can make small, as rows of a table."""
    models = work / "types"
    make_tiny(python, models, TYPES)
    folders = sorted(path for path in models.iterdir() if (path / "config.json").exists())
    layouts = learned(python, {folder: [{"tp": 1}, {"tp": 2}] for folder in folders})
    for folder, layout in layouts.items():
        print(row_of(folder.name, layout))
    traced = [folder for folder, layout in layouts.items() if isinstance(layout, LearnedLayout)]
    yield "70 types are traced", len(traced) >= 70, f"{len(traced)}"


def row_of(name: str, layout: LearnedLayout | str) -> str:
    """A row of docs/reference/traced-models.md."""
    if not isinstance(layout, LearnedLayout):
        return f"| {name} | - | {layout.partition('rank 0: ')[2][:90]} |"
    problems = {each.template.problem for stage in layout.stages.values() for each in stage if each.template.problem}
    kernels = any(each.template.kernel for stage in layout.stages.values() for each in stage)
    about = "; ".join(
        [*sorted({problem.partition(" to ")[0] for problem in problems}), *(["experts depend on the platform"] if kernels else [])]
    )
    return f"| {name} | {layout.model_class} | {about} |"


def declared(python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Trace against declaration: both give the same elements for every rank."""
    models = {name: json.loads((HF / name / "config.json").read_text()) for name in DECLARED}
    cases, zeros, types = {name: cases_of(name) for name in DECLARED}, dict[str, str | None](), dict[str, dict[str, str]]()
    for path in sorted((FIXTURES / "vllm_declared").glob("*.json")):
        reference = json.loads(path.read_text())
        degrees = [sizes_of(degree) for degree, ranks in reference["degrees"].items() if isinstance(ranks, list)]
        # vLLM has kernels for experts in MXFP4 on GPUs alone, and its loader asks for one. Classes whose sizes are written in their code
        # are too large to be compared element by element, and some configs are read by code of the checkpoint.
        if degrees and not quantization_settings(reference["config"]) and not reference.keys() & {"class_sizes", "config_class"}:
            models[path.stem], cases[path.stem] = reference["config"], degrees if LONG else [{"tp": 2}]
            zeros[path.stem], types[path.stem] = reference.get("zeros"), reference.get("types", {})
    missing = sorted(set(built_in_model_types()) - {name.partition("-")[0] for name in models} - UNTRACED.keys())
    yield "every declared type is traced, or refused by name", all(map(is_refused, missing)), ", ".join(missing)
    folders = {work / "declared" / name: name for name in models}
    weights = {folder: write_named(folder, models[name], zeros.get(name), types.get(name, {})) for folder, name in folders.items()}
    layouts = learned(python, {folder: cases[name] for folder, name in folders.items()})
    for folder, layout in layouts.items():
        for sizes in cases[folder.name]:
            what = f"{folder.name} at {spelled(sizes)}: the layout that vLLM's loader makes is the declared one"
            if not isinstance(layout, LearnedLayout):
                yield what, False, layout
                continue
            found, expected = (
                dict(enumerate(each)) for each in both(layout, models[folder.name], weights[folder], sizes, types.get(folder.name, {}))
            )
            yield what, found == expected, "\n".join(differences(found, expected, layout))


def is_refused(model_type: str) -> bool:
    """Whether the declaration says that vLLM has no class for such a model, or does not load it from files of ranks."""
    architecture = find_architecture(model_type)
    assert architecture is not None
    quirks = architecture.engines.get("vllm")
    return quirks is not None and "always" in quirks.refuses


def write_named(folder: Path, config: dict[str, Any], zeros: str | None, types: dict[str, str]) -> dict[str, Any]:
    """A model whose weights follow from their names, in a folder; the elements of its weights."""
    model = find_model(config)
    assert model is not None
    shapes = {weight.name: weight.shape for weight in model.weights.values() if not weight.optional}
    named_weights.write(folder, {**config, **READ_AS.get(folder.name.partition("-")[0], {})}, shapes, zeros, types)
    return named_weights.weights_of(shapes, zeros, types)


def both(
    layout: LearnedLayout, config: dict[str, Any], weights: dict[str, Any], sizes: Sizes, types: dict[str, str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the ranks hold: by the layout, and by the declaration."""
    model, parallel = find_model(config), Parallel(**sizes)
    assert model is not None
    model = Model(model.architecture, {**model.config, str(model.architecture.mtp_layers): 0})
    ranks = [layout.rank_tensors(parallel, tp, pp, {}) for pp in range(parallel.pp) for tp in range(parallel.tp)]
    traced = [described([each for each in rank if each.nbytes], weights, our_value) for rank in ranks]
    return traced, list(laid_out(model, weights, sizes, our_value, types))


def make_tiny(python: Path, folder: Path, types: Iterable[str]) -> None:
    """Tiny models of these types, in folders of their names; those that transformers cannot make are left out."""
    subprocess.run([python, HERE / "tiny_models.py", folder, *types], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def cases_of(name: str) -> list[Sizes]:
    if not LONG:
        return [{"tp": 2}]
    experts: list[Sizes] = [{"tp": 2, "ep": 2}, {"tp": 4, "ep": 4}] if name in WITH_EXPERTS else []
    return [{"tp": 1}, {"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}, *experts]


def undeclared(reshard: Path, python: Path, work: Path) -> Iterator[tuple[str, bool, str]]:
    """Files by a learned layout against real ranks."""
    models = work / "tiny"
    make_tiny(python, models, UNDECLARED)
    cases = {models / name: [{"tp": tp} for tp in ((1, 2) if name in TWO_SIZES else (1, 2, 4))] for name in UNDECLARED}
    layouts = learned(python, cases)
    with served(python, work / "hub") as ask:
        for folder, layout in layouts.items():
            for tp in (1, 2):
                what = f"{folder.name} at TP {tp}: files by a learned layout hold what real ranks hold"
                if not isinstance(layout, LearnedLayout):
                    yield what, False, layout
                    continue
                write_layout(layout, work / f"{folder.name}.json")
                options = ("--tp", str(tp), "--layout", str(work / f"{folder.name}.json"), "--accept-platform")
                found = convert(reshard, folder, work / "learned", "vllm", *options)
                real, messages = asked(ask, "ranks", {"model": str(folder), "tensor_parallel_size": tp}, None)
                if isinstance(found, str) or real is None:
                    yield what, False, f"{found if isinstance(found, str) else messages[-1500:]}"
                else:
                    yield what, found == real, "\n".join(differences(real, found, layout))
        yield from in_one_command(reshard, python, work, ask)
        yield from read_by_the_plugin(reshard, python, work, ask)
    yield from closed(python, {folder: layout for folder, layout in layouts.items() if isinstance(layout, LearnedLayout)})


def in_one_command(reshard: Path, python: Path, work: Path, ask: Ask) -> Iterator[tuple[str, bool, str]]:
    """`convert --learn` of a type without a declaration holds what real ranks hold; the second time the layout is there."""
    make_tiny(python, work / "tiny", (WITHOUT_DECLARATION,))
    folder, library = work / "tiny" / WITHOUT_DECLARATION, work / "library"
    yield f"{WITHOUT_DECLARATION} is not declared", find_architecture(WITHOUT_DECLARATION) is None, ""
    real, messages = asked(ask, "ranks", {"model": str(folder), "tensor_parallel_size": 2}, None)
    for times in ("once", "again"):
        options = ("--tp", "2", "--learn", "--engine-python", str(python), "--layout-dir", str(library))
        found = convert(reshard, folder, work / "learned-at-once", "vllm", *options)
        kept = [path.name for path in library.glob("*")]
        what = f"{WITHOUT_DECLARATION} with --learn, {times}: files hold what real ranks hold, and one layout is kept"
        yield what, found == real is not None and len(kept) == 1, f"{kept} {found if isinstance(found, str) else messages[-1500:]}"


def read_by_the_plugin(reshard: Path, python: Path, work: Path, ask: Ask) -> Iterator[tuple[str, bool, str]]:
    """--load-format reshard of a model that is not declared: with a layout each worker reads its own bytes, and holds what vLLM loads."""
    folder, plugin = work / "tiny" / "granite", installed(python, work)
    found, messages = held(ask, folder, plugin, {"layout": str(work / "granite.json")}, tensor_parallel_size=2)
    expected, _ = held(ask, folder, None, {}, tensor_parallel_size=2)
    yield "granite by --load-format reshard with a layout: ranks hold what vLLM loads", found == expected is not None, messages[-1500:]
    yield "the log says that it was read by a learned layout", "read by rank by a learned layout" in messages, messages[-1500:]


def closed(python: Path, layouts: dict[Path, LearnedLayout]) -> Iterator[tuple[str, bool, str]]:
    """The rules of TP 1, 2 and 4 at TP 8, against a trace at TP 8."""
    from reshard.geometry.meshes import Parallel
    from reshard.serving.learned.fit import size_problem

    legal = [folder for folder, layout in layouts.items() if size_problem(layout, Parallel(8)) is None]
    engine = next(iter(layouts.values())).engine
    traced = learned(python, {folder: [{"tp": 8}] for folder in legal}, engine)
    for folder, layout in traced.items():
        if isinstance(layout, LearnedLayout):
            found, expected = ([each.rank_tensors(Parallel(8), rank, 0, {}) for rank in range(8)] for each in (layouts[folder], layout))
            same = [sorted(map(str, rank)) for rank in found] == [sorted(map(str, rank)) for rank in expected]
            yield f"{folder.name}: TP 8 follows from TP 1, 2 and 4", same and sections(found) == sections(expected), ""
        else:
            yield f"{folder.name}: TP 8 follows from TP 1, 2 and 4", False, layout
    enough = 10 if LONG else 4
    yield f"{enough} models have closed rules", len(legal) >= enough, f"{len(legal)}"


def sections(found: list[Any]) -> list[Any]:
    """The boxes of every tensor of every rank, in an order of their own."""
    return [sorted((tensor.name, sorted(map(str, tensor.sections))) for tensor in rank) for rank in found]


def learned(python: Path, cases: dict[Path, list[Sizes]], engine: str = "vllm") -> dict[Path, LearnedLayout | str]:
    """The layout of each model at these sizes, traced in one process; or why there is none."""
    requests = [{"model": str(folder), "cases": sizes, "ranks": None, "trust_remote_code": False} for folder, sizes in cases.items()]
    answers: list[list[dict[str, Any]]] = []
    for line in tracer_of(engine, python).answers(requests):
        if "engine" in line:
            answers.append([])
        answers[-1].append(line)
    found: dict[Path, LearnedLayout | str] = {}
    for folder, (about, *lines) in zip(cases, answers, strict=True):
        try:
            found[folder] = learned_layout(about, map(traced_rank, lines), config_of(folder))
        except Exception as error:
            found[folder] = f"{type(error).__name__}: {error}"
    return found


def convert(reshard: Path, source: Path, target: Path, engine: str, *options: str) -> dict[str, Any] | str:
    """What the ranks' files hold after a conversion; or the error."""
    command = [reshard, "convert", source, target, "--to", engine, "--overwrite", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    return ranks(target) if done.returncode == 0 else done.stderr[-1500:]


def differences(found: dict[str, Any], expected: dict[str, Any], layout: LearnedLayout) -> Iterator[str]:
    """What vLLM has, and a conversion does not have in this way. Of tensors that have only another name, the row to add."""
    for rank in sorted(found.keys() | expected.keys()):
        theirs, ours = found.get(rank, {}), expected.get(rank, {})
        missing = {name: tensor for name, tensor in theirs.items() if name not in ours}
        surplus = {name: tensor for name, tensor in ours.items() if name not in theirs}
        for name, tensor in missing.items():
            same = [other for other, each in surplus.items() if each == tensor]
            if same:
                yield f"{rank}: {same[0]} is now called {name}. {row_to_add(same[0], name, layout.engine_version)}"
            else:
                yield f"{rank}: vLLM {layout.engine_version} has {name} {tensor['dtype']} {tensor['shape']}, which is not written"
        for name in surplus.keys() - {each for name, tensor in missing.items() for each, other in surplus.items() if other == tensor}:
            yield f"{rank}: {name} is written, which vLLM {layout.engine_version} does not have"
        for name in theirs.keys() & ours.keys():
            if theirs[name] != ours[name]:
                yield f"{rank}: {name} is {json.dumps(theirs[name])}, written is {json.dumps(ours[name])}"


def row_to_add(ours: str, theirs: str, version: str) -> str:
    """The row of formats/vllm/rules.py that gives a tensor its new name."""
    words, others = ours.split("."), theirs.split(".")
    start = next((i for i, (a, b) in enumerate(zip(words, others, strict=False)) if a != b), min(len(words), len(others)))
    ends = zip(reversed(words[start:]), reversed(others[start:]), strict=False)
    end = next((i for i, (a, b) in enumerate(ends) if a != b), min(len(words), len(others)) - start)
    old, new = (".".join(each[start : len(each) - end]) for each in (words, others))
    tail = f"(?=\\.{words[-end]})" if end else "$"
    numbers = ", ".join(version.split(".")[:2])
    return f'Row for the model in formats/vllm/rules.py: Rename(r"\\.{old}{tail}", ((({numbers}), ".{new}"),))'


def spelled(sizes: Sizes) -> str:
    return " ".join(f"{size.upper()} {number}" for size, number in sizes.items())


if __name__ == "__main__":
    raise SystemExit(run_checks(checks, VLLM, __doc__))
