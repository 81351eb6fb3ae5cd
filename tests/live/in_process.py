"""vLLM's LLM in this process, updated by a Sender in this process. Prints its tokens and log-probabilities.

python in_process.py MODEL [WEIGHTS]      WEIGHTS: the folder whose weights it gets before it is asked
"""

import json
import sys
from pathlib import Path

PROMPTS = ([3, 17, 91, 200, 45], [7, 7, 12, 133, 240, 5, 66], [101, 22])


def main(model: str, weights: str | None = None) -> None:
    from vllm import LLM, SamplingParams

    small = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 64, "max_num_seqs": 4, "skip_tokenizer_init": True}
    llm = LLM(model=model, weight_transfer_config={"backend": "reshard"}, **small)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True, detokenize=False)

    def answers():
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
        steps = [zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True) for output in outputs]
        return [[(token, step[token].logprob) for token, step in each] for each in steps]

    report = None
    if weights:
        from live.hand_plan import HandPlan
        from safetensors.torch import load_file

        from reshard.live.sender import Sender

        answers()
        held = load_file(Path(weights) / "model.safetensors")
        config = json.loads((Path(weights) / "config.json").read_text())
        sender = Sender(held, llm, plan=HandPlan(config, {name: tuple(tensor.shape) for name, tensor in held.items()}, 1, 1))
        report = sender.update("new")
        sender.close()
    print("ANSWER", json.dumps({"answers": answers(), "version": report and [report.version, llm.get_weight_version()]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
