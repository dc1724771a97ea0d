"""SAC of SBX (JAX). What is timed begins after the first updates: they compile."""

import json
import sys
import time

STARTED = time.perf_counter()

from result import tell  # noqa: E402
from sbx import SAC  # noqa: E402


def main(work):
    sizes = {name: work[name] for name in ("learning_starts", "batch_size")}
    model = SAC("MlpPolicy", work["env"], policy_kwargs={"net_arch": [256, 256]}, seed=0, **sizes)
    model.learn(work["warm_up"])
    updates, begun = model._n_updates, time.perf_counter()
    model.learn(work["steps"], reset_num_timesteps=False)
    seconds = time.perf_counter() - begun
    tell(work, work["steps"], seconds, model._n_updates - updates, begun - STARTED)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
