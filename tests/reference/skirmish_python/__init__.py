"""Skirmish in plain Python, registered as SkirmishPython-v0: what the kernels are tested against."""

import gymnasium

if "SkirmishPython-v0" not in gymnasium.registry:
    gymnasium.register("SkirmishPython-v0", "reference.skirmish_python.env:SkirmishPythonEnv")
