"""A game of bidding and playing for two policies: the info says whose decision it is.

fasttrain +profile=speed algo=ppo env.entry_point=bidding:Bidding total_timesteps=200000 \
    'policies={manager: {decides: bid, batch_size: 64, algo.n_epochs: 8}, worker: {decides: play}}'
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

CARDS, ROUNDS = 5, 4


class Bidding(gym.Env):
    """Bid how many of your cards will win, then play them one by one. A card wins if it is above the one you see."""

    action_space = spaces.Discrete(CARDS + 1)  # a bid from 0 to 5, or the place of a card in the hand
    observation_space = spaces.Box(-1.0, 1.0, (CARDS + 3,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.rounds = 0
        self._deal()
        return self._seen(), self._info()

    def step(self, action):
        if self.bid is None:
            self.bid = int(action)
            return self._seen(), 0.0, False, False, self._info()
        held = np.flatnonzero(self.hand >= 0)
        card = held[min(int(action), len(held) - 1)]
        self.won += bool(self.hand[card] > self.opposing)
        self.hand[card], self.opposing = -1.0, self.np_random.random()
        if len(held) > 1:
            return self._seen(), 0.0, False, False, self._info()
        missed, self.rounds = abs(self.won - self.bid), self.rounds + 1
        self._deal()
        info = {**self._info(), "is_success": missed == 0}
        return self._seen(), 1.0 - missed, self.rounds == ROUNDS, False, info

    def _deal(self):
        self.bid, self.won, self.opposing = None, 0, self.np_random.random()
        self.hand = np.sort(self.np_random.random(CARDS))

    def _seen(self):
        bid = -1.0 if self.bid is None else self.bid / CARDS
        return np.array([*self.hand, self.opposing, bid, self.won / CARDS], np.float32)

    def _info(self):
        return {"policy": "bid" if self.bid is None else "play"}
