"""Doors of engines through which trainers update their weights: what each engine adds to reshard.live."""
