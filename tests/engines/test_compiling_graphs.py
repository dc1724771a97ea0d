"""CUDA graphs: the bookkeeping on any machine, by replays that run the function again; the rest where CUDA is."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from accelerated import SETTINGS, a_batch, a_step, filled, masked_model, run_again, weights, with_compiler
from fasttrain.algos.ppo import MaskablePPO
from fasttrain.engines.compiling import GraphedOutputs, GraphedUpdate, addresses, capturable, graphed_by_size
from fasttrain.engines.engine import EngineSettings
from fasttrain.engines.torch import TorchEngine
from toys import single_thread, toy_gym_vec

one_thread = pytest.fixture(autouse=True)(single_thread)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need CUDA")
GRAPHS = EngineSettings(compile_mode="reduce-overhead")


def graph_for(model: Any) -> GraphedUpdate:
    step = a_step(model)
    return GraphedUpdate(step.whole, a_batch(model), model.policy, step.key, run_again)


def graph_of_update(model: Any) -> Any:
    """What the engine's update would replay."""
    return model.engine.graph_of(a_step(model), model.rollout_buffer, model.work())


def test_a_capture_takes_no_step():
    model = filled(masked_model(EngineSettings()))
    before = weights(model)
    graph = graph_for(model)
    assert torch.equal(weights(model), before)
    assert {float(state["step"]) for state in model.policy.optimizer.state.values()} == {0.0}
    assert not any(state["exp_avg"].any() for state in model.policy.optimizer.state.values())
    assert graph.replays == 0


def test_replays_learn_what_eager_steps_learn():
    ends = []
    for graphed in (False, True):
        model = filled(masked_model(EngineSettings()))
        graph = graph_for(model) if graphed else None
        np.random.seed(1)
        for _ in range(6):
            batch = a_batch(model)
            if graph is None:
                step = a_step(model)
                assert step.gradients(batch)
                step.apply()
            else:
                assert graph.fits(batch)
                with capturable(model.policy.optimizer, graph.rates):
                    assert graph(batch).shape == (7,)
        ends.append(weights(model))
        assert {float(state["step"]) for state in model.policy.optimizer.state.values()} == {6.0}
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)


def test_the_learning_rate_of_now_is_used():
    model = filled(masked_model(EngineSettings()))
    graph = graph_for(model)
    for group in model.policy.optimizer.param_groups:
        group["lr"] = 0.0
    assert graph.begin()
    before = weights(model)
    with capturable(model.policy.optimizer, graph.rates):
        graph(a_batch(model))
    assert torch.equal(weights(model), before)
    model.policy.optimizer.param_groups[0]["lr"] = 0.01
    assert graph.begin()
    with capturable(model.policy.optimizer, graph.rates):
        graph(a_batch(model))
    assert not torch.equal(weights(model), before)


def test_what_moved_must_be_captured_anew():
    model = filled(masked_model(EngineSettings()))
    graph = graph_for(model)
    assert graph.begin()
    saved = copy.deepcopy(model.policy.optimizer.state_dict())
    model.policy.optimizer.load_state_dict(saved)  # as set_parameters does
    assert not graph.begin()
    assert graph_for(model).begin()
    model.policy.action_net.weight.data = model.policy.action_net.weight.data.clone()
    assert addresses(model.policy.optimizer) != graph.addresses


def test_acting_leaves_a_graph_whose_parameters_moved(monkeypatch: pytest.MonkeyPatch):
    model = filled(masked_model(GRAPHS))
    engine = with_compiler(model, lambda function: function)
    monkeypatch.setattr(TorchEngine, "graphs", True)
    monkeypatch.setattr(
        "fasttrain.engines.tuned.graphed_by_size",
        lambda outputs, examples: graphed_by_size(outputs, examples, run_again),
    )
    monkeypatch.setattr(TorchEngine, "graph_of", lambda *_: None)
    assert engine.prepare(model.rollout_buffer, model.work(), [5]) == ""

    def acting() -> Any:
        engine.begin()
        return engine.head.acting

    graphed = acting()
    assert graphed != engine.compiled.outputs
    assert acting() is graphed
    model.policy.action_net = nn.Linear(64, 8)
    assert acting() == engine.compiled.outputs


def test_a_capture_is_no_phase_of_training(monkeypatch: pytest.MonkeyPatch):
    model = filled(masked_model(EngineSettings()))
    model.use_engine(GRAPHS)
    monkeypatch.setattr(TorchEngine, "graphs", True)
    monkeypatch.setattr("fasttrain.engines.tuned.GraphedUpdate", lambda *given: GraphedUpdate(*given, run_again))
    model.collector.clock.reset()
    assert isinstance(graph_of_update(model), GraphedUpdate)
    spent = model.collector.clock.snapshot()
    assert spent["train_fwd"] == spent["train_bwd"] == 0


def test_other_sizes_do_not_fit():
    model = filled(masked_model(EngineSettings()))
    graph = graph_for(model)
    assert graph.fits(a_batch(model))
    assert not graph.fits(a_batch(model, 19))


def test_options_of_the_optimizer_are_put_back():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    before = optimizer.state_dict()["param_groups"]
    with capturable(optimizer, [torch.tensor(0.5)]):
        assert optimizer.param_groups[0]["lr"].item() == 0.5
    assert optimizer.state_dict()["param_groups"] == before
    with pytest.raises(ZeroDivisionError), capturable(optimizer, [torch.tensor(0.5)]):
        raise ZeroDivisionError
    assert optimizer.state_dict()["param_groups"] == before


def test_acting_sees_new_weights_and_its_outputs_are_kept():
    net = nn.Linear(3, 2)

    def outputs(observations: Any) -> Any:
        return net(observations), net(observations).sum(1, keepdim=True)

    with torch.no_grad():
        graph = GraphedOutputs(outputs, torch.zeros(4, 3), run_again)
        first = graph(torch.ones(4, 3))
        kept = [part.clone() for part in first]
        net.weight.mul_(2)
        second = graph(torch.ones(4, 3))
        assert torch.equal(first[0], kept[0]), "memory of its own"
        assert not torch.equal(second[0], kept[0])
        torch.testing.assert_close(second[0], net(torch.ones(4, 3)))


def test_one_graph_per_size_and_eager_for_the_others():
    calls: list[int] = []

    def outputs(observations: Any) -> Any:
        calls.append(len(observations["a"]))
        return observations["a"] + 1, observations["a"]

    examples = [{"a": torch.zeros(size, 1)} for size in (4, 2)]
    chosen = graphed_by_size(outputs, examples, lambda function: (lambda: None, function()))
    assert calls == [4, 2]
    with torch.no_grad():
        chosen({"a": torch.ones(4, 1)})
        chosen({"a": torch.ones(2, 1)})
        assert calls == [4, 2], "replayed, not called"
        chosen({"a": torch.ones(3, 1)})
    chosen({"a": torch.ones(4, 1)})
    assert calls == [4, 2, 3, 4], "with gradients the eager way"


@pytest.mark.parametrize(
    ("kwargs", "settings", "reason"),
    [
        ({"target_kl": 0.1}, GRAPHS, "target_kl stops in the middle"),
        ({}, EngineSettings(compile_mode="reduce-overhead", amp_dtype=torch.float16), "a gradient scaler decides"),
        ({"policy_kwargs": {"optimizer_class": torch.optim.RMSprop}}, GRAPHS, "not a plain Adam"),
    ],
)
def test_where_no_graph_can_be(
    kwargs: dict[str, Any], settings: EngineSettings, reason: str, monkeypatch: pytest.MonkeyPatch
):
    model = filled(masked_model(EngineSettings(), **kwargs))
    model.use_engine(settings)
    engine = model.engine_now()
    monkeypatch.setattr(type(engine), "graphs", True)
    assert graph_of_update(model) is None
    assert reason in engine.graph_failure


def test_a_capture_that_fails_is_named(monkeypatch: pytest.MonkeyPatch):
    model = filled(masked_model(GRAPHS))
    engine = model.engine_now()
    monkeypatch.setattr(type(engine), "graphs", True)

    def fails(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("fasttrain.engines.tuned.GraphedUpdate", fails)
    assert graph_of_update(model) is None
    failure = "no CUDA graph of the update: RuntimeError: operation not permitted when stream is capturing"
    assert engine.graph_failure == failure
    monkeypatch.setattr("fasttrain.engines.tuned.GraphedUpdate", lambda *_: pytest.fail("tried again"))
    assert graph_of_update(model) is None
    assert engine.graph_failure == failure


def test_a_graph_comes_once_its_obstacle_is_gone(monkeypatch: pytest.MonkeyPatch):
    model = filled(masked_model(EngineSettings(), target_kl=0.1))
    model.use_engine(GRAPHS)
    engine = model.engine_now()
    monkeypatch.setattr(type(engine), "graphs", True)
    tried: list[Any] = []
    monkeypatch.setattr("fasttrain.engines.tuned.GraphedUpdate", lambda *given: tried.append(given) or "a graph")
    assert graph_of_update(model) is None
    model.target_kl = None
    assert graph_of_update(model) == "a graph"
    assert engine.graph_failure == ""


def test_the_update_replays_and_does_the_rest_eagerly(monkeypatch: pytest.MonkeyPatch):
    model = filled(masked_model(EngineSettings(), batch_size=30))  # 30, 30, 20
    model.use_engine(GRAPHS)
    engine = model.engine_now()
    step = a_step(model)
    graph = GraphedUpdate(step.whole, a_batch(model, 30), model.policy, step.key, run_again)
    monkeypatch.setattr(engine, "graph_of", lambda *_: graph)
    model.train()
    assert graph.replays == 2 * 2
    assert model.engine.gradient_updates == 2 * 3
    assert model._n_updates == 2
    assert model.policy.optimizer.param_groups[0]["lr"] == 3e-4
    assert torch.isfinite(torch.tensor(model.logger.name_to_value["train/value_loss"]))


@needs_cuda
def test_cuda_graphs_train_as_eager_does():
    ends = []
    for settings in (EngineSettings(), GRAPHS):
        model = MaskablePPO("MlpPolicy", toy_gym_vec(), **(SETTINGS | {"device": "cuda"}))
        model.use_engine(settings)
        model.learn(240)
        ends.append(weights(model).cpu())
    graph = model.engine.graphed_update
    assert graph is not None, model.engine.graph_failure
    assert graph.replays == 24
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-3)


@needs_cuda
def test_draws_differ_between_replays_and_spread_as_eager_ones():
    model = MaskablePPO("MlpPolicy", toy_gym_vec(), **(SETTINGS | {"device": "cuda"}))
    model.use_engine(GRAPHS)
    filled(model)
    actions = torch.as_tensor(model.rollout_buffer.actions).flatten(1)
    assert len({tuple(row.tolist()) for row in actions}) > 1, "every step has draws of its own"


@needs_cuda
def test_acting_on_cuda_sees_what_was_learned():
    model = MaskablePPO("MlpPolicy", toy_gym_vec(), **(SETTINGS | {"device": "cuda"}))
    model.use_engine(GRAPHS)
    model.learn(80)
    observations = np.zeros((5, 3), np.float32)
    with torch.no_grad():
        before = model.engine.act(observations, None).stored.values
        model.policy.value_net.bias.add_(1.0)
        after = model.engine.act(observations, None).stored.values
    torch.testing.assert_close(after, before + 1.0)
