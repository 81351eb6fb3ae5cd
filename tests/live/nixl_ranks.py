"""Ranks of a trainer and of an engine, each a process with a real NIXL agent: the trainer's write into the engine's memory.

    python nixl_ranks.py HF FILES SOURCES TP     prints, as JSON, what was wrong with the memory of each target rank, and the bytes written

HF is a Hugging Face folder, FILES what `convert --to vllm --tp TP` wrote of it. Run with an interpreter that has nixl-cu12, torch and
reshard.
"""

import json
import multiprocessing
import sys
import time
from pathlib import Path

import torch
from nixl_cu12._api import nixl_agent, nixl_agent_config
from safetensors.torch import load_file

import reshard

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "examples" / "live"))
from nixl_descriptors import descriptors

SECONDS = 60.0


def plan_of(hf: str, sources: int, tp: int):
    return reshard.transfers(json.loads(Path(hf, "config.json").read_text()), of="fsdp", degrees={"dp": sources}, to="vllm", tp=tp)


def agent_with(name: str, tensors):
    """An agent whose tensors other agents may reach."""
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    regions = [(tensor.data_ptr(), tensor.nbytes, 0, key) for key, tensor in tensors.items() if tensor.nbytes]
    agent.register_memory(agent.get_reg_descs(regions, "DRAM"))
    return agent


def source(rank: int, given, pipe) -> None:
    """Write what the plan says into the memory of the targets."""
    hf, _, sources, tp = given
    whole, plan = load_file(Path(hf) / "model.safetensors"), plan_of(hf, sources, tp)
    # FSDP2 cuts the first axis as torch.chunk does; a rank beyond the last part has nothing.
    parts = {name: torch.chunk(weight, sources) for name, weight in whole.items()}
    own = {name: chunks[rank].clone() if rank < len(chunks) else chunks[0][:0].clone() for name, chunks in parts.items()}
    agent, nbytes = agent_with(f"source {rank}", own), 0
    sends, targets = plan.sends(rank), pipe.recv()
    for way in sends.ways:
        metadata, addresses = targets[way.target_rank]
        peer = agent.add_remote_agent(metadata)
        runs = list(descriptors(sends, way, {name: tensor.data_ptr() for name, tensor in own.items()}, addresses))
        local = agent.get_xfer_descs([(ours, length, 0) for ours, _, length in runs], "DRAM")
        remote = agent.get_xfer_descs([(theirs, length, 0) for _, theirs, length in runs], "DRAM")
        handle = agent.initialize_xfer("WRITE", local, remote, peer, b"done")
        state, ends_at = agent.transfer(handle), time.monotonic() + SECONDS
        while state == "PROC" and time.monotonic() < ends_at:
            time.sleep(0.01)
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        nbytes += sum(length for *_, length in runs)
    pipe.send(nbytes)
    pipe.recv()


def target(rank: int, given, pipe) -> None:
    """Give memory, and compare what was written there with the files."""
    hf, files, sources, tp = given
    # Rows that no source feeds, such as padding, are zeros.
    tensors = plan_of(hf, sources, tp).targets(rank)
    own = {each.name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype.torch)) for each in tensors}
    agent = agent_with(f"target {rank}", own)
    pipe.send((agent.get_agent_metadata(), {name: tensor.data_ptr() for name, tensor in own.items()}))
    pipe.recv()
    expected = {}
    for path in Path(files).glob(f"model-rank-{rank}-part-*.safetensors"):
        expected |= load_file(path)
    fed = {name for name in own if not name.endswith("_scale")}
    wrong = [name for name in fed if not torch.equal(own[name].view(torch.uint8), expected[name].view(torch.uint8))]
    pipe.send(wrong + sorted(fed ^ {name for name in expected if not name.endswith("_scale")}))


def main() -> None:
    hf, files, sources, tp = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    spawn = multiprocessing.get_context("spawn")

    def started(work, count):
        pipes = [spawn.Pipe() for _ in range(count)]
        processes = [spawn.Process(target=work, args=(i, (hf, files, sources, tp), theirs)) for i, (_, theirs) in enumerate(pipes)]
        for process in processes:
            process.start()
        # A process that ends early is then heard of.
        for _, theirs in pipes:
            theirs.close()
        return [ours for ours, _ in pipes], processes

    (targets, waiting), (senders, sending) = started(target, tp), started(source, sources)
    told = [pipe.recv() for pipe in targets]
    for pipe in senders:
        pipe.send(told)
    nbytes = [pipe.recv() for pipe in senders]
    for pipe in targets:
        pipe.send("written")
    wrong = [pipe.recv() for pipe in targets]
    for pipe in senders:
        pipe.send("end")
    for process in [*waiting, *sending]:
        process.join()
    print(json.dumps({"wrong": wrong, "bytes": sum(nbytes), "planned": plan_of(hf, sources, tp).nbytes}))


if __name__ == "__main__":
    main()
