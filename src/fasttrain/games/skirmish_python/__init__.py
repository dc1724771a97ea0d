"""Skirmish in plain Python: the rules to read, and an honest stand-in for a user's slow environment."""
