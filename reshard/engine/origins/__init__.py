"""Origins: how the values of a tensor are read, a file for each origin of index/origin.py (readers.py has the table).

Recipes make the codes and scales of weights (encoded.py):

fp8-block          bfloat16 -> FP8 in blocks of 128 x 128, the bits of llm-compressor 0.14 (model_free_ptq, FP8_BLOCK)
mxfp4              bfloat16 -> MXFP4 in groups of 32, the bits of llm-compressor 0.14 (model_free_ptq, MXFP4A16)
exact-fp8-block    any values -> FP8 in blocks of 128 x 128 with powers of two as scales, the same values or nothing
"""
