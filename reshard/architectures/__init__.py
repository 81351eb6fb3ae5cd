"""One file per `model_type`, each ending in its one public object, ARCHITECTURE."""
