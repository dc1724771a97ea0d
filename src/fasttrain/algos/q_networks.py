"""Where model zips of version 0.1 name the classes of their policies; they live in `fasttrain.engines.q_networks`."""

from fasttrain.engines.q_networks import *  # noqa: F403
