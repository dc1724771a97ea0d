"""Envs and their wrappers. Nothing here imports torch: worker processes import this package and must stay small."""
