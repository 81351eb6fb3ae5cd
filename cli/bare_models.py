"""What `inspect` shows of a model without weights: a folder with nothing but a config.json, or a config alone."""

from __future__ import annotations

import shlex

from reshard.geometry.quantities import plural

from .tables import count_text, show


def show_bare_model(path: str) -> None:
    """What the model of a config is, which engines serve it, and the command that plans with it.

    Raises: RequestError if its architecture is not declared.
    """
    from reshard.models.model import Model
    from reshard.models.quantization import without_quantization
    from reshard.plans import summary
    from reshard.requests.opening import model_at
    from reshard.requests.outlook import engine_sizes
    from reshard.training.parameter_counts import parameters

    model = model_at(path)
    plain = Model(model.architecture, without_quantization(model.config))
    d, experts, count = model.dimensions, summary.experts(plain), parameters(plain)
    about_experts = ""
    if experts is not None:
        top = "" if experts.per_token is None else f", top {experts.per_token}"
        active = ""
        if experts.idle_parameters is not None:
            # As those of the model, without the layers for multi-token prediction.
            ahead = sum(weight.elements for weight in plain.weights.values() if weight.optional and weight.role.startswith("expert."))
            idle = experts.idle_parameters - ahead // experts.number * (experts.number - (experts.per_token or 0))
            active = f"{count_text(count - idle)} active; "
        about_experts = f" ({active}{plural(experts.number, 'expert')}{top})"
    show(
        f"{path}: {model.architecture.model_type}, {count_text(count)} parameters{about_experts}; a model without weights, its config alone"
    )
    heads = f"{plural(d['heads'], 'head')} ({d['kv_heads']} KV)"
    tied = ", tied head" if model.is_tied else ""
    show(f"  model     {plural(d['layers'], 'layer')}, hidden {d['hidden']}, {heads}, vocabulary {d['vocab']}{tied}")
    if sizes := engine_sizes(model):
        show("  serves    " + "; ".join(f"{name} at TP {', '.join(map(str, legal))}" for name, legal in sizes.items()))
        show(f"  next      reshard degrees {shlex.quote(path)} --to {'vllm' if 'vllm' in sizes else min(sizes)}")
