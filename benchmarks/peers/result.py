"""What a peer's program prints; it runs beside this file, in the peer's environment."""

import json


def tell(work, steps, seconds, updates, startup_s, returns=()):
    """One line of JSON; the last 100 returns are the quality."""
    found = {
        "rate": steps / seconds,
        "env_steps": steps,
        "updates": updates,
        "samples_per_update": work["batch_size"],
        "startup_s": startup_s,
    }
    last = [float(value) for value in returns][-100:]
    print(json.dumps({**found, "quality": sum(last) / len(last)} if last else found))
