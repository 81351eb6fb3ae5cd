"""The recipes by name."""

from __future__ import annotations

from collections.abc import Mapping

from reshard.engine.recipes.fp8 import exact_fp8_block_codes, exact_fp8_block_scales, fp8_block_codes, fp8_block_scales
from reshard.engine.recipes.microscaling import mxfp4_codes, mxfp4_scales
from reshard.engine.recipes.recipe import Recipe
from reshard.geometry.dtypes import BF16, F32

RECIPES: Mapping[str, Recipe] = {
    "fp8-block": Recipe(BF16, (128, 128), fp8_block_codes, fp8_block_scales),
    "mxfp4": Recipe(BF16, (1, 32), mxfp4_codes, mxfp4_scales),
    "exact-fp8-block": Recipe(F32, (128, 128), exact_fp8_block_codes, exact_fp8_block_scales),
}
