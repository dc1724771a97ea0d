"""Adapters to other libraries. They are found by name (`spec/plugins.py`); no other module imports them."""
