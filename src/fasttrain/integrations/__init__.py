"""Adapters to other people's libraries, each found by its name (`spec/plugins.py`) and imported by nobody."""
