"""Verbs for whoever serves: a cache of converted models, and the check of a folder before an engine starts on it."""
