"""Greedy decoding with real vLLM, in a process of its own: prints the tokens and their log-probabilities as JSON.

    python decode.py MODEL_DIR TP auto|sharded_state|reshard [JSON]

JSON: further options of vLLM's LLM. Runs in the vLLM environment. The prompts are token ids, so that no tokenizer is needed.
"""

import json
import os
import sys

PROMPTS = ([3, 17, 91, 200, 45], [7, 7, 12, 133, 240, 5, 66], [101, 22], [249, 180, 31, 8, 77, 154, 2, 19, 60])
TOKENS = 8


def decode(model: str, tp: int, load_format: str, options: dict[str, object]) -> list[dict[str, list[object]]]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        tensor_parallel_size=tp,
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=64,
        disable_log_stats=True,
        **{"max_num_seqs": 4, **options},
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=1, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], sampling, use_tqdm=False)
    return [_answer(output.outputs[0]) for output in outputs]


def _answer(completion) -> dict[str, list[object]]:
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return {"tokens": list(completion.token_ids), "logprobs": [step[token].logprob for token, step in steps]}


if __name__ == "__main__":
    # Only the answer goes to stdout; what vLLM and its workers print goes to stderr.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    model_dir, tp_size, how, *more = sys.argv[1:]
    answers = decode(model_dir, int(tp_size), how, json.loads(more[0]) if more else {})
    os.write(answer_to, json.dumps(answers).encode())
    os._exit(0)
