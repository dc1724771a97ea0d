"""Rollout and replay storage."""
