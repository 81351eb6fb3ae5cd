"""The recipes by name."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.engine.recipes.fp8 import exact_fp8_block, fp8_block
from reshard.engine.recipes.microscaling import mxfp4, saturates
from reshard.engine.recipes.recipe import Recipe
from reshard.geometry.dtypes import BF16

RECIPES: Mapping[str, Recipe] = {
    "fp8-block": Recipe(BF16, (128, 128), fp8_block),
    "mxfp4": Recipe(BF16, (1, 32), mxfp4, saturates),
    "exact-fp8-block": Recipe(None, (128, 128), exact_fp8_block),
}
