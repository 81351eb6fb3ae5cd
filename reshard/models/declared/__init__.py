"""The language in which models are declared: from YAML text to an Architecture, and back."""
