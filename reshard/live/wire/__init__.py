"""How bytes travel between ranks, and where they are collected."""
