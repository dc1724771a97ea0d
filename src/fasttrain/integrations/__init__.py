"""Adapters to other libraries. They are found by name (`spec/plugins.py`); no module imports them."""
