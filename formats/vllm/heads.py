"""What vLLM's classes for pooling hold: those that it makes of a language model's class, and those of their own.

    LlamaForSequenceClassification    the language model under its names, score.weight in float32, whole on every rank of every stage
    LlamaForTokenClassification       the same, and score.bias
    Qwen2ForRewardModel               score.0 and score.2, which ranks share like the two matrices of an MLP
    LlamaModel                        the language model under its names, also where the checkpoint's lack "model.", and no head

Source: vLLM 0.32, models/adapters.py, models/qwen2_rm.py and config/model.py (head_dtype); compared with real ranks by
tests/serving/head_ranks.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from reshard.adapter.serving_format.release import BARE, release_at
from reshard.errors import UnsupportedError
from reshard.geometry.dtypes import BF16, F16, F32, DType
from reshard.geometry.quantities import plural
from reshard.models.architecture import ClassHead
from reshard.models.engine_rules import EngineRules, Rename, Version
from reshard.models.model import Model

# The release whose classes were compared.
SINCE: Version = (0, 32)
# Classes of their own -> the number of labels that they set, for an MLP; 0: as many as the config says, for one matrix.
_OF_THEIR_OWN = {"GPT2ForSequenceClassification": 0, "Qwen2ForRewardModel": 1, "Qwen2ForProcessRewardModel": 2}
# Classes under whose names vLLM has the class of a language model, which it serves as that unless it is told otherwise.
_OF_LANGUAGE = ("Gemma2Model", "LlamaModel", "MistralModel", "Qwen2Model")
# What a config's head_dtype may say; "model": the type of the model.
_HEAD_DTYPES: dict[object, DType | None] = {"model": None, "float32": F32, "float": F32, "float16": F16, "half": F16, "bfloat16": BF16}
_TIED = "its class holds the embedding on the last stage as well where the config ties it to a head, which was not compared"


def pooling_rules(model: Model, head: ClassHead) -> EngineRules:
    """What a head that is not a language model's adds to the rules for the model."""
    if head.beside:  # the class of the language model, which has no slot for it
        return EngineRules(unsupported=frozenset({("class_head", "weight"), ("class_head", "bias")}))
    old, new = head.front
    is_bare = head.class_name in BARE
    return EngineRules(
        since=SINCE,
        names=(Rename(rf"^{re.escape(new)}(?!{re.escape(old)})", old),) if old and not head.module and not is_bare else (),
        dtypes={"class_head": _HEAD_DTYPES.get(_head_dtype(model), F32)},
        every_stage=frozenset({"class_head"}),
        refuses={"pp > 1 and tie_word_embeddings": _TIED},
    )


def check_head(model: Model) -> None:
    """Raises UnsupportedError for a head that vLLM's class of the model does not have, that it computes, or that was not compared."""
    head, named = model.architecture.head, model.class_name or ""
    if head is None and model.setting("classifier_from_token") and named.endswith("ForSequenceClassification"):
        raise UnsupportedError(
            f"vLLM computes the classifier of this {named} from rows of the head, which the config's classifier_from_token names",
            why="It does so while it loads a Hugging Face folder. A model that stores the result as score.weight, without "
            "classifier_from_token, converts: for from_2_way_softmax the row of the second token minus that of the first, in float32",
            do="Use its Hugging Face folder, which `to=hf` writes",
        )
    if head and (why := next(_refusals(model, head), None)):
        raise UnsupportedError(
            f"this is {head.what} ({named}), and {why}",
            why="vLLM would refuse the files, or serve unset weights",
            do="Use its Hugging Face folder, which `to=hf` writes; `reshard serve-check` says whether an engine takes it",
        )


def _head_dtype(model: Model) -> object:
    return model.setting("head_dtype") or "float32"


def _refusals(model: Model, head: ClassHead) -> Iterator[str]:
    """Why files of ranks are not written, as the second half of a sentence."""
    if head.beside:
        return
    release, named = release_at(Path(__file__).with_name("release.json"), "vLLM"), head.class_name
    own = _OF_THEIR_OWN.get(named)
    if not (head.module or head.is_usual):
        yield "its class alone knows what its further weights are"
    if own is None and release and release.has_class(named) is not True:
        yield f"{release.engine} has no class {named}"
    if own is None and release and named in release.classes and named not in (*_OF_LANGUAGE, *BARE):
        yield f"vLLM's own class {named} was not compared"
    if release and head.module and (bare := release.lacks_front(named)):
        yield f"vLLM takes {bare} for it, whose names lack `model.`"
    if named in BARE and not head.front[0]:
        yield "vLLM's class takes no names with `model.`"
    if own is None and head.module and (head.module != "score" or "weight" not in head.parts):
        yield f"the head of the class that vLLM makes is one matrix, score.weight, where the model has {head.module}.{head.parts[0]}"
    if own is not None and ("weight" in head.parts) != (own == 0):
        forms = ("an MLP", "one matrix") if own else ("one matrix", "an MLP")
        yield f"the head of vLLM's class is {forms[0]}, where the model has {forms[1]}"
    if own and model.dimensions["labels"] != own:
        yield f"vLLM's class has {plural(own, 'label')}, where the model has {model.dimensions['labels']}"
    if head.module and model.quantization:
        yield "whether vLLM takes the head of a quantized model for quantized was not compared"
    if _head_dtype(model) not in _HEAD_DTYPES:
        yield f"vLLM takes no head_dtype {_head_dtype(model)!r}"


def rows_of_other_tokens(model: Model, tp: int) -> str | None:
    """What several ranks make of classifier_from_token; None if it is not set, or for one rank.

    Each takes the rows by the tokens' numbers out of its own part of the head (adapters.py, load_weights_using_from_2_way_softmax; seen
    with real ranks of 0.32 at TP 2: rank 1 holds another score.weight, and a number beyond the part ends with an IndexError).
    """
    if tp == 1 or not model.setting("classifier_from_token"):
        return None
    return (
        f"at TP {tp} vLLM 0.32 looks up the tokens of classifier_from_token in each rank's own part of the vocabulary: it does not start "
        "if one of their numbers lies beyond that part, and rank 0 alone holds the model's classifier"
    )


def not_loaded(head: ClassHead) -> tuple[str, str] | None:
    """What vLLM's loader of files of ranks has no place for, and what to do; None if it has one for every tensor.

    Its class gets a bias only while a Hugging Face folder is loaded (auto_set_score_bias in models/adapters.py).
    """
    if head.module != "score" or "bias" not in head.parts:
        return None
    what = "vLLM 0.32's own loader of such files has no place for score.bias, and ends with a KeyError"
    return what, "Serve them with --load-format reshard, which makes one, or serve the Hugging Face folder"


def notes_on_head(head: ClassHead) -> tuple[str, ...]:
    """How vLLM is told to serve the files."""
    if refusal := not_loaded(head):
        return (". ".join(refusal),)
    if head.module or head.class_name not in _OF_LANGUAGE:
        return ()
    told = "start vLLM with --runner pooling, which it does by itself where modules.json of sentence-transformers is there"
    return (f"vLLM takes {head.class_name} for a language model, whose head the files do not have: {told}",)
