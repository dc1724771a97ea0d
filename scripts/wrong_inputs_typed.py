"""Wrong inputs by hand, all of them typed: contradictions, grammar, options, command words, candidates, sweeps."""

from __future__ import annotations

from collections.abc import Iterator

from wrong_inputs_settings import ENV, Case

CONTRADICTIONS = (
    "algo.n_steps=4 algo.rollout_size=64", "batch_size=65 algo.rollout_size=64", "num_envs=65 algo.rollout_size=64",
    "batch_size=9 algo.n_steps=4", "algo.n_steps=1 batch_size=2", "force_dummy_vec_env=true vec_env=shared",
    "force_dummy_vec_env=true vec_env=native", "use_subproc_envs=false vec_env=subproc",
    "use_subproc_envs=false vec_env=shared", "num_workers=3 num_envs=2 vec_env=shared", "num_workers=2 vec_env=dummy",
    "num_workers=1 num_envs=2 vec_env=subproc", "train_log_to_file=true train_log_enabled=false", "algo.net_arch=[0]",
    "algo.net_arch={pi:[4],q:[4]}", "algo.net_arch=[64,-1]", "algo.net_arch=[a]", "algo.policy=CnnPolicy",
    "algo.policy=MultiInputPolicy", "schedule=pipelined", "schedule=first_ready",
    "engine=stock fused_update=on", "overlap=true", "engine_switch_at=5", "algo.learning_rate=linear_",
    "algo.clip_range=linear_x",
    "inference_batch_size=4", "gradient_accumulation=2 engine=stock", "eval.episodes=1",
    "env.on_env_error=restart vec_env=dummy", "seed=99999999999", "eval.seed=99999999999", "tier=fastest",
    "stop.patience=2", "profiler=cprofile", "on_existing=ask", "live=maybe", "checkup=loud",
    "algo.shared_lstm=true algo=recurrent_ppo", "algo=recurrent_ppo engine=fast use_amp=on",
    "algo=dqn algo.buffer_size=10 batch_size=11", "algo=dqn num_envs=20 algo.buffer_size=10 batch_size=4",
    "algo=dqn engine=stock algo.dueling=true", "algo=dqn engine=stock algo.prioritized=true",
    "algo=dqn algo.n_steps=129", "algo=dqn engine=stock algo.double_q=true", "algo=dqn algo.per_alpha=0.5",
    "algo=dqn algo.buffer_size=1e15", "algo.rollout_size=1e15", "algo.n_steps=1e13", "total_timesteps=1e400",
    "num_envs=1e12", "num_envs=0", "batch_size=1", "algo.gamma=1.01", "algo.gae_lambda=-0.1", "algo.clip_range=0",
    "algo.learning_rate=-1e-4", "algo.ent_coef=-1", "env.max_episode_steps=0", "env.frame_stack=0",
    "env.frame_stack=1.5", "action_repeat=0", "torch_threads=9999",
)  # fmt: skip


def contradictions() -> Iterator[Case]:
    start = (*ENV, "algo=ppo", "engine=fast")
    for text in CONTRADICTIONS:
        typed = tuple(text.split())
        keys = tuple(part.partition("=")[0] for part in typed if not part.startswith("algo="))
        keys = (*keys, *(key.removeprefix("algo.") for key in keys if "buffer_size" in key))
        yield Case("contradiction", (*start, *typed), keys)
        yield (
            Case("contradiction", (*start, "-m", *typed), keys)
            if "," in text
            else Case("contradiction", (*start, *reversed(typed)), keys)
        )


# --- what is typed

GRAMMAR = (
    "num_envs", "num_envs:4", "=4", "==", "num_envs==4", "num_envs=[", "num_envs={", "num_envs=]", "num_envs='4",
    'num_envs="4', "num_envs=(4", "num_envs=4)", "num_envs=$x", "num_envs=${", "num_envs=${x", "num_envs=${seed",
    "num_envs=${nothing}", "num_envs=${oc.env:NOTHING_OF_THAT_NAME}", "num_envs=${num_envs}", "num_envs=a b",
    'num_envs=\x00', 'num_envs=\n', 'num_envs=\u2028', "num_envs=ä", "num_envs=😀", 'num_envs=\ud800', "num_envs=4,",
    "num_envs=,4", "num_envs=4,8", "num_envs=range(1,4)", "num_envs=glob(*)", "num_envs=sort(1,2", "num_envs=f(1)",
    "num_envs=choice()", "num_envs=interval(1,2)", "num_envs.x=4", "num_envs[0]=4", ".num_envs=4", "num_envs.=4",
    "num..envs=4", "ä=4", "+=4", "+num_envs=4", "~num_envs", "~num_envs=4", "~seed", "~algo", "~env", "~algo.gamma",
    "~nothing", "++nothing=1", "+nothing=1", "+algo=dqn", "algo=[ppo,dqn]", "algo=PPO", "algo=a3c", "algo=sac",
    "algo=", "algo=null", "algo=5", "algo.name=a2c", "algo.name=dqn", "env=atari", "env=", "env=null", "env=5",
    "env=/etc/passwd", "+env=gym", "+profile=spead", "+profile=5", "+profile=null", "+profile=[speed,nothing]",
    "++profile=speed", "profile=speed,balance", "+profile=speed,balance", "hydra.nothing=1", "hydra.run.dir=",
    "hydra.run.dir=null", "hydra.run=5", "hydra=5", "hydra.run.dir=[1]", "hydra/launcher=joblib",
    "hydra.job.nothing=1", "hydra.mode=5", "algo@x=ppo", "nothing@x=y", "x/y=z", "/num_envs=4", "num_envs=4#",
    "[1,2]", "{}", "''", '""', "a", "A", "5", "num envs=4", "=", "-", "num_envs=-", "defaults=[]", "defaults.0=x",
    "_target_=os.system", "algo._target_=os.system", "env.kwargs=5", "env.kwargs=[1]", "env.kwargs=abc",
    "env.kwargs.=5", "env.kwargs..x=5", "~env.kwargs.nothing",
)  # fmt: skip
OPTIONS = (
    "--nothing", "-x", "--num-envs 4", "--num_envs=4", "--config-dir", "--config-dir=",
    "--config-dir=/no/such/folder", "--config-dir nothing", "--config-name nothing", "--config-name",
    "--config-path nothing", "--config-path", "--config-path=/no/such", "--cfg", "--cfg nothing", "--cfg=x",
    "--info nothing", "--resolve", "--trust", "-m -m --trust", "--multirun=3", "---", "--run=x", "-c", "-cd",
    "-cp nothing", "--shell-completion", "--experimental-rerun nothing.pickle", "--experimental-rerun",
)  # fmt: skip
WORDS = (
    "trian", "TRAIN", "evaluate", "traineval", "train eval", "eval train", "help", "version", "run", "train train",
    "resume", "eval", "export", "play", "report", "compare", "tune study=", "doctor --test", "doctor --test nothing",
    "doctor --test=", "doctor doctor.test=x", "ablate", "ablate ablate.flags=[nothing]", "ablate study=nothing",
    "compare study=nothing", "tune study=nothing", "warmup run=x", "check run=x", "resume run=", "eval run=",
    "eval run=x num_envs=4", "export run=x", "export format=onnx", "export run=x format=tflite", "play play.speed=-1",
    "tune -m num_envs=4,8", "compare -m", "doctor -m", "resume -m run=a,b", "play -m run=a,b", "train --trust",
    "compare --trust", "tune tune.space=5", "tune tune.space={nothing:[1]}", "tune tune.space={num_envs:5}",
    "tune tune.space={num_envs:[abc]}", "tune tune.sampler=grid", "report run=nothing", "play run=nothing",
    "tune +profile=speed minutes=0", "compare seeds=0 candidates=[baseline,speed]", "check env.backend=envpool",
)  # fmt: skip
CANDIDATES = (
    "", "[]", "5", "abc", "[baseline]", "[baseline,baseline]", "[baseline,nothing]", "[baseline,5]", "[[a],[b]]",
    "[baseline,null]", "{a: 1}", "[baseline,{name: x}]", "[baseline,{name: x, overrides: 5}]", "[", "[baseline,",
    "[baseline,{name: x, overrides: [num_envs=abc]}]", "[baseline,{name: x, overrides: [nothing=1]}]", "]",
    "[baseline,{nam: x, overrides: []}]", "[baseline,num_envs=0]", "[baseline,'num_envs=[']", "[baseline,algo=x]",
    "[baseline,{name: x, overrides: [5]}]", "[baseline,{name: [1], overrides: []}]", "null", "'", '[baseline,\t]',
    "[baseline,{name: x, overrides: [-m]}]", "[baseline,'']", "[baseline,!!python/object:os.system x]",
    "[baseline,{name: x, overrides: ['num_envs=4,8']}]", "[baseline, &a [*a]]",
    "[baseline,{name: '', overrides: []}]",

)  # fmt: skip

SWEEPS = (
    "num_envs=abc,def", "num_envs=", "num_envs=,", "num_envs=1,", "nothing=1,2", "algo=ppo,nothing", "algo=x,y",
    "num_envs=[", "num_envs=range(1,2,3,4)", "num_envs=glob(*)", "env=x,y", "+profile=speed,nothing", "hydra.x=1,2",
    "num_envs=choice(", "+profile=x,y", "algo.n_step=1,2", "num_envs=range(5,1)",
)  # fmt: skip


def typed() -> Iterator[Case]:
    known = ("report=false", "total_timesteps=8")
    for text in GRAMMAR:
        bare = text.lstrip("+~").partition("=")[0].strip("'\"")
        yield Case("grammar", (*ENV, "algo=ppo", text), (bare, text))
        if not text.startswith(("num_envs", "algo")):  # which would be said again, rightly
            yield Case("grammar", (text, *ENV, "algo=ppo"), (bare, text))
    for text in OPTIONS:
        words = tuple(text.split(" "))
        named = (words[0].partition("=")[0], *words[1:], "-m", "--config-dir", "subcommand")
        yield Case("option", (*ENV, "algo=ppo", *words), named)
        yield Case("option", (*words, *ENV, "algo=ppo"), named)
    for text in WORDS:
        words = tuple(text.split(" "))
        named = tuple(word.partition("=")[0] for word in words)
        more = () if "+profile" in text else ("+profile=speed",)
        yield Case("command", words, (*named, "run=", "format="))
        if words[0] not in ("ablate", "tune") or "flags" in text or "space" in text:  # else that begins one
            yield Case("command", (*words, *more, *known), (*named, "run=", "format="))
    for text in CANDIDATES:
        for more in ((), ("seeds=2", "algo=ppo", "env.id=CartPole-v1")):
            yield Case("candidates", ("compare", f"candidates={text}", *more, *known), ("candidate",))
    for text in SWEEPS:
        bare = text.lstrip("+").partition("=")[0]
        yield Case("sweep", ("-m", *ENV, "algo=ppo", text), (bare,))
