"""Engines of others on these runners; each is a module of its own, which is imported by its name."""
