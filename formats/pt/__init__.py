from .read import FORMAT

__all__ = ["FORMAT"]
