"""Greedy decoding with real vLLM: the tokens and their log-probabilities. The prompts are token ids, so that no tokenizer is needed."""

PROMPTS = ([3, 17, 91, 200, 45], [7, 7, 12, 133, 240, 5, 66], [101, 22], [249, 180, 31, 8, 77, 154, 2, 19, 60])
TOKENS = 8


def answer(
    model: str, tensor_parallel_size: int, load_format: str, max_num_seqs: int = 4, **options: object
) -> list[dict[str, list[object]]]:
    """Of each prompt its continuation. options: of vLLM's LLM."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        tensor_parallel_size=tensor_parallel_size,
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=64,
        max_num_seqs=max_num_seqs,
        disable_log_stats=True,
        **options,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=1, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], sampling, use_tqdm=False)
    return [_told(output.outputs[0]) for output in outputs]


def _told(completion) -> dict[str, list[object]]:
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return {"tokens": list(completion.token_ids), "logprobs": [step[token].logprob for token, step in steps]}
