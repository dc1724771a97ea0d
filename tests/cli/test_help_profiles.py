"""The tables of what profiles change against stock SB3."""

from __future__ import annotations

from fasttrain.cli.help import profiles, table


def cells(profile: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(profile).splitlines()]
    assert rows[0] == ["setting", "class", "ppo", "maskable_ppo", "recurrent_ppo", "dqn", "sac"]
    return {row[0]: row[1:] for row in rows[2:]}


def test_speed_changes_learning_rate_rollout_and_minibatch_of_ppo_alone():
    speed = cells("speed")
    assert speed["algo.learning_rate"] == ["trade-off", *["0.0003 → 0.001"] * 2, "0.0003", "0.0001", "0.0003"]
    assert speed["algo.rollout_size"] == ["trade-off", *["16384 → 4096"] * 2, "1024", "–", "–"]
    assert speed["batch_size"] == ["trade-off", *["64 → 256"] * 2, "128", "64 → 256", "256"]
    assert speed["updates_per_step"] == ["trade-off", "–", "–", "–", "1 → 10", "1 → 10"]
    assert speed["use_amp"][3:] == ["–", "off → auto", "–"], "RecurrentPPO and SAC compute in float32"
    assert "algo.n_epochs" not in speed, "it stays as it is"


def test_exact_changes_what_is_of_class_exact():
    assert {row[0] for row in cells("exact").values()} == {"exact", ""}


def test_stock_changes_nothing_of_itself():
    assert {"baseline", "balance", "exact", "speed", "debug"} == {*profiles()}
    assert cells("baseline") == {}
