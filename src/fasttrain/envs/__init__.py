"""Envs and their wrappers. Nothing here imports torch: worker processes load this room and stay small."""
