"""An engine whose games have four decisions, of both sides in turn, on its pipes; for tests of self-play with engines.

A decision names 0 to 3; the learner is paid what it names and loses what the other side names. Who begins changes from
game to game; in a game that was begun with a bot the engine names 0 itself. It does not take 3 as a game's second
decision. With `--dies N` it ends at its Nth answer, with `--twice` each side decides twice in a row.
"""

from __future__ import annotations

import json
import sys


def say(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    dies = int(sys.argv[sys.argv.index("--dies") + 1]) if "--dies" in sys.argv else 0
    begun = asked = made = paid = 0
    bot, twice = False, "--twice" in sys.argv
    for line in sys.stdin:
        message = json.loads(line)
        if "new" in message:
            begun, made, paid, bot = begun + 1, 0, 0, message["bot"]
        elif made == 1 and message["action"] == 3:
            say(refused=True, legal=[0, 1, 2])
            continue
        else:
            theirs = ((made // 2 if twice else made) + begun) % 2 == 0
            paid, made = -message["action"] if theirs else message["action"], made + 1
        if bot and made < 4 and ((made // 2 if twice else made) + begun) % 2 == 0:
            made += 1
        asked += 1
        if asked == dies:
            sys.exit(1)
        if made == 4:
            say(over=True, reward=paid)
        else:
            say(made=made, theirs=((made // 2 if twice else made) + begun) % 2 == 0, reward=paid)


if __name__ == "__main__":
    main()
