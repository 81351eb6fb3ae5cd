"""DeepSeek-V3: deepseek_v2 with a correction of the router's scores, and layers that predict further tokens.

Source: transformers, models/deepseek_v3/modeling_deepseek_v3.py, which leaves the extra layers out; their names are the published
model's: copies of its embedding and head are among them.
"""

from reshard.architectures.deepseek_v2 import ARCHITECTURE as DEEPSEEK_V2
from reshard.models.architecture import Weight

_LAYER = "model.layers.{layer}."

ARCHITECTURE = DEEPSEEK_V2.plus(
    Weight(_LAYER + "mlp.gate.e_score_correction_bias", "router.correction", ("experts",), layers="sparse"),
    Weight(_LAYER + "embed_tokens.weight", "extra.embedding", ("vocab", "hidden"), layers="extra"),
    Weight(_LAYER + "enorm.weight", "extra.embedding_norm", ("hidden",), layers="extra"),
    Weight(_LAYER + "hnorm.weight", "extra.hidden_norm", ("hidden",), layers="extra"),
    Weight(_LAYER + "eh_proj.weight", "extra.projection", ("hidden", "2 * hidden"), layers="extra"),
    Weight(_LAYER + "shared_head.norm.weight", "extra.final_norm", ("hidden",), layers="extra"),
    Weight(_LAYER + "shared_head.head.weight", "extra.head", ("vocab", "hidden"), layers="extra"),
    model_type="deepseek_v3",
    extra_layers="num_nextn_predict_layers",
)
