"""One run: train, evaluate, callbacks, files. Read `train.py` first."""
