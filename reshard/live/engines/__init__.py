"""Engines that a sender updates: what it asks of them, and how vLLM and SGLang are asked."""
