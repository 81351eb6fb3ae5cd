"""The verb `verify`, of an adapter and a live server: does the server list the version that `push_adapter` loads from this adapter?"""

from __future__ import annotations

from reshard.canonical.adapters.forms import form_of
from reshard.engine.blocks import fingerprint_of_result
from reshard.engine.compare import Difference
from reshard.errors import printable
from reshard.geometry.quantities import plural
from reshard.geometry.value import mutable
from reshard.live.engines.adapters import adapter_server
from reshard.opening.checkpoint import Checkpoint
from reshard.opening.open import open
from reshard.verbs.serve.push_adapter import base_here, digits_of, is_version, plan_of_adapter
from reshard.verbs.server_comparison import ServerComparison


@mutable
class AdapterComparison(ServerComparison):
    """What a live server lists of its adapters, compared with an adapter. The names of the server's adapters that tell no fingerprint are
    `not_comparable`."""

    def verdict(self, server: str = "the server") -> str:
        """The result in one sentence."""
        if self.equal:
            return f"{server} lists this adapter as {self.version}"
        if self.equal is None:
            return f"cannot tell: {self.notes[0]}"
        return f"{server} does not list this adapter: {self.differences[0].detail}"


def verify_adapter(checkpoint: Checkpoint, address: str) -> AdapterComparison:
    """Whether a live server lists an adapter under its fingerprint. Names are compared: no server tells what it holds of an adapter.

    Raises: SystemRefusal if the server cannot be reached; UnsupportedError if its engine is not known; as `plan`, of the adapter.
    """
    control = adapter_server(address)
    served = control.models()
    if checkpoint.model_files.config is None and (folder := base_here(served)):
        checkpoint = open(checkpoint.path, **{**checkpoint.options, "model": folder})
    result = AdapterComparison(parameters=len(checkpoint.index.tensors))
    if checkpoint.model_files.config is None and form_of(tensor.name for tensor in checkpoint.index.tensors):
        result.not_comparable = [tensor.name for tensor in checkpoint.index.tensors]
        result.notes.append("the form in which its engine reads the experts follows from the base; name its directory with `model=DIR`")
        return result
    settings = checkpoint.model_files.adapter_config or {}
    # The alpha is no part of the tensors, and so not of the fingerprint.
    planned = plan_of_adapter(checkpoint, control, served, None if settings.get("lora_alpha") is not None else "1")
    result.total_nbytes = sum(tensor.nbytes for tensor in planned.content.tensors.values())
    result.fingerprint = fingerprint_of_result(planned).root
    digits = digits_of(result.fingerprint)
    result.version = next((name for name in served.adapters if name.endswith(f"@{digits}")), None)
    nameless = [name for name in served.adapters if not is_version(name)]
    if result.version is not None:
        result.matching = result.tensors = result.parameters
        result.nbytes = result.total_nbytes
        result.notes.append("names are compared: `push` gives an adapter its fingerprint, and no server tells what it holds of one")
    elif nameless:
        result.not_comparable = nameless
        result.notes.append(f"{plural(len(nameless), 'name')} of its adapters, such as {printable(nameless[0])}, tell no fingerprint")
    else:
        listed = ", ".join(map(printable, served.adapters)) or "none"
        result.differences.append(Difference(digits, "missing", f"its fingerprint begins with {digits}; the server's adapters: {listed}"))
    return result
