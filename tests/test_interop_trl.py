"""TRL: the rollout function and the environments, with a stand-in for the trainer; and with the real one.

The tests whose names end in `_real` need torch and trl; here they are skipped, and `test_in_an_environment_of_its_own` runs them there.
"""
import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import peers
from pool_faults import HANG, soon

from xland_minigrid.interop.trl import ChatTokens, _runs, environment_factory, make_rollout_func, pool_reward, task_in_prompt, task_in_row, trl_fields
from xland_minigrid.pool.episodes import Env
from xland_minigrid.pool.errors import BadRequest, EnvFault, PoolClosed, PoolExhausted
from xland_minigrid.pool.group import Rollout, RolloutGroup
from xland_minigrid.pool.pool import EnvPool

HERE = "tests/test_interop_trl.py"


class Counting(Env):
    "Text: rewards the number that is said; 'break' breaks it; over after three turns, or as `turns` says."
    open = 0

    def __init__(self, env_config):
        super().__init__(env_config)
        if env_config.get("seed") is None:
            raise ValueError("a seed is needed")

    async def reset(self, config):
        if self.env_config.get("broken"):
            raise OSError("no disk")
        Counting.open += 1
        self.turns = 0
        return f"seed {self.env_config['seed']}", {}, "count"

    async def step(self, action):
        said = action[-1]["content"]
        if "break" in said:
            raise OSError("cut")
        self.turns += 1
        return f"turn {self.turns}", float(sum(map(str.isdigit, said))), self.turns >= self.env_config.get("turns", 3), {}

    async def close(self):
        Counting.open -= hasattr(self, "turns")


class Letters:
    "A tokenizer: one token a character, 0 ends an answer."
    eos_token_id, chat_template = 0, "x"

    def encode(self, text, add_special_tokens=False):
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids if i or not skip_special_tokens)

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, return_dict=True):
        text = "".join(f"<{m['role'][0]}>{m['content']}\0" for m in messages) + "<a>" * add_generation_prompt
        return self.encode(text) if tokenize else text


def trainer(generations=4, training=True):
    return SimpleNamespace(processing_class=Letters(), model=SimpleNamespace(training=training), num_generations=generations, num_generations_eval=1)


def says(*texts, logprobs=True):
    "A generate function that answers with these texts in turn, the same for all that ask together; a list: one for each."
    texts = iter(texts)
    def generate(contexts, trainer):
        said = next(texts)
        said = said if isinstance(said, list) else [said] * len(contexts)
        return [([ord(c) for c in text] + [0], [-1.0] * (len(text) + 1) if logprobs else None) for text in said]
    return generate


def prompt(task):
    return [{"role": "user", "content": json.dumps(task)}]


# -- tokens

def test_an_episode_is_one_row_of_tokens():
    with make_rollout_func(EnvPool.local(Counting, slots=4), says("1", "22", "333")) as f:
        out = f([prompt({"seed": 5})] * 4, trainer())
    assert f.batches == [4, 4, 4] and out["env_reward"] == [6.0] * 4 == pool_reward(None, **out) and out["env_turns"] == [3] * 4 and out["env_error"] == [None] * 4
    letters = Letters()
    row = letters.decode(out["prompt_ids"][0] + out["completion_ids"][0])
    assert row == "<s>count\0<u>seed 5\0<a>1\0<u>turn 1\0<a>22\0<u>turn 2\0<a>333\0"
    mine = "".join(chr(i) for i, m in zip(out["completion_ids"][0], out["env_mask"][0]) if m)
    assert mine == "1\x0022\x00333\0"
    assert [lp for lp, m in zip(out["logprobs"][0], out["env_mask"][0]) if not m] == [0.0] * (len(out["env_mask"][0]) - len(mine))


def test_an_answer_that_was_cut_off_gets_its_end():
    tokens = ChatTokens(Letters())
    assert tokens.reply("x", [65]) == [0] + tokens.reply("x", [65, 0]) and tokens.reply("x", []) == tokens.reply("x", [65])
    plain = SimpleNamespace(chat_template=None, encode=Letters().encode, decode=Letters().decode, eos_token_id=0)
    assert ChatTokens(SimpleNamespace(tokenizer=plain)).first([{"role": "user", "content": "a"}]) == [97, 10]
    hiding = Letters()
    hiding.apply_chat_template = lambda *a, **k: "nothing"
    with pytest.raises(ValueError, match="template"):
        ChatTokens(hiding).reply("x", [1])


def test_turns_and_tokens_are_limited():
    with make_rollout_func(EnvPool.local(Counting, slots=2), says(*"1111"), max_turns=2) as f:
        assert f([prompt({"seed": 0, "turns": 9})] * 2, trainer(2))["env_turns"] == [2, 2]
    with make_rollout_func(EnvPool.local(Counting, slots=2, max_total_tokens=40), says(*["1" * 8] * 9)) as f:
        out = f([prompt({"seed": 0, "turns": 9})] * 2, trainer(2))
    assert all(len(p) + len(c) <= 40 for p, c in zip(out["prompt_ids"], out["completion_ids"])) and out["env_turns"] == [1, 1]


# -- what fails has no reward

def test_a_failure_is_no_reward():
    with make_rollout_func(EnvPool.local(Counting, slots=4), says(["1", "break", "2", "3"], "1", "1")) as f:
        out = f([prompt({"seed": 5})] * 4, trainer())
        assert f.pool.stats()["failures"] >= 1
    assert out["env_reward"] == [3.0, None, 3.0, 3.0] and out["env_error"][1] and sum(r.error is not None for r in f.groups[0]) == 1
    assert not any(out["env_mask"][1]) and any(out["env_mask"][0])
    assert Counting.open == 0


def test_a_group_that_never_began_has_rows_of_one_masked_token():
    with make_rollout_func(EnvPool.local(Counting, slots=2), says("1", "1", "1")) as f:
        out = f([prompt({"seed": 5, "broken": True})] * 2 + [prompt({"seed": 6})] * 2, trainer(2))
    assert out["env_reward"] == [None, None, 3.0, 3.0]
    assert out["completion_ids"][:2] == [[0], [0]] and out["env_mask"][:2] == [[0], [0]] and out["logprobs"][:2] == [[0.0], [0.0]] and all(out["prompt_ids"])


def test_a_mistake_in_the_data_is_raised():
    with make_rollout_func(EnvPool.local(Counting, slots=2), says("1")) as f:
        with pytest.raises(BadRequest, match="does not make an environment"):
            f([prompt({"turns": 2, "seed": None})] * 2, trainer(2))
        with pytest.raises(ValueError, match="task"):
            f([[{"role": "user", "content": "Play!"}]] * 2, trainer(2))
        with pytest.raises(ZeroDivisionError):
            f.generate = lambda contexts, trainer: 1 / 0
            f([prompt({"seed": 1})] * 2, trainer(2))
        f.generate = says("1")                                                              # StopIteration in the second turn
        with pytest.raises(RuntimeError, match="StopIteration"):
            f([prompt({"seed": 1})] * 2, trainer(2))
        f.generate = lambda contexts, trainer: []
        with pytest.raises(ValueError, match="0 answers to 2"):
            f([prompt({"seed": 1})] * 2, trainer(2))
        f.generate = says("1", "1", "1")
        assert f([prompt({"seed": 1})] * 2, trainer(2))["env_reward"] == [3.0, 3.0]       # and all goes on
    assert Counting.open == 0


def test_missing_log_probabilities_are_missing_for_all():
    with make_rollout_func(EnvPool.local(Counting, slots=2), says(*"111", logprobs=False)) as f:
        assert f([prompt({"seed": 1})] * 2, trainer(2))["logprobs"] is None
    empty = RolloutGroup(0, [Rollout(None, 0, i, SimpleNamespace(n=0, info={}, observation="")) for i in range(2)])
    for rollout in empty:
        rollout.fail("never began")
    assert trl_fields([empty], 9)["prompt_ids"] == [[9], [9]]


# -- groups and tasks

def test_more_groups_than_room_and_groups_of_unequal_size():
    assert _runs(list("aabbb"), None) == [("a", 2), ("b", 3)] and _runs([], 2) == []
    seen = []
    def generate(contexts, trainer):
        seen.append(len(contexts))
        return [([ord("1"), 0], [0.0, 0.0]) for _ in contexts]
    with make_rollout_func(EnvPool.local(Counting, slots=4), generate) as f:
        out = f([prompt({"seed": i // 4}) for i in range(18)], trainer(4))
    assert out["env_reward"] == [3.0] * 18 and len(f.groups) == 5 and [len(g) for g in f.groups] == [4, 4, 4, 4, 2] and max(seen) == 4 and sum(seen) == 54
    assert [g.task["seed"] for g in f.groups] == [0, 1, 2, 3, 4]


def test_the_curriculum_chooses_and_learns():
    log = []
    curriculum = SimpleNamespace(next_task=lambda: {"seed": 8}, record_result=lambda *a: log.append(a))
    with make_rollout_func(EnvPool.local(Counting, slots=2, curriculum=curriculum), says(*"111")) as f:
        f([prompt({"seed": 1})] * 2, trainer(2))
    assert f.groups[0].task == {"seed": 8} and log == [({"seed": 8}, True, 3.0)]


def test_grids_need_words():
    with pytest.raises(ValueError, match="observe="):
        make_rollout_func(EnvPool.local("MiniGrid-Empty-6x6", slots=1), says("1"))
    shown = []
    def observe(array):
        shown.append(array.shape)
        return f"sum {int(array.sum())}"
    with make_rollout_func(EnvPool.local("MiniGrid-Empty-6x6", slots=2, max_steps=3), says(*"121"), observe=observe, act=int) as f:
        out = f(["3", "3"], trainer(2))
    assert out["env_turns"] == [3, 3] and set(shown) == {(7, 7, 2)} and "sum" in Letters().decode(out["prompt_ids"][0])


def test_inside_a_running_loop():
    async def main():
        with make_rollout_func(EnvPool.local(Counting, slots=2), says(*"111")) as f:
            return f([prompt({"seed": 1})] * 2, trainer(2))
    assert asyncio.run(main())["env_reward"] == [3.0, 3.0]


def test_wrong_arguments():
    pool = lambda: EnvPool.local(Counting, slots=1)
    for wrong, kind in ((dict(generate=3), TypeError), (dict(task_of=3), TypeError), (dict(max_turns=0), ValueError), (dict(max_turns=True), ValueError)):
        with pytest.raises(kind):
            make_rollout_func(pool(), **wrong)
    with pytest.raises(TypeError, match="EnvPool"):
        make_rollout_func(None)
    closed = pool()
    with closed.sync:
        pass
    with pytest.raises(PoolClosed):
        make_rollout_func(closed)
    for bad in ("true", "[1]", "x", None, [], [{"role": "user", "content": None}]):
        with pytest.raises(ValueError):
            task_in_prompt(bad)


def test_an_open_pool_stays_open():
    with EnvPool.local(Counting, slots=2).sync as pool:
        with make_rollout_func(pool, says(*"111")) as f:
            f([prompt({"seed": 1})] * 2, trainer(2))
        with environment_factory(pool) as factory:
            factory().reset(seed=1)
            assert len(pool.roster.taken) == 1
        assert not pool.roster.taken and pool.reset_group({"seed": 3})


# -- environments as tools

def test_rows_are_tasks():
    assert task_in_row({"task": {"seed": 1, "size": None}}) == {"seed": 1} and task_in_row({"env_config": None, "seed": 4}) == 4 and task_in_row({"prompt": "x"}) is None


def test_tools():
    import inspect
    with environment_factory(EnvPool.local(Counting, slots=2), tool_name="count", description="Say a number.") as factory:
        a, b = factory(), factory()
        call = lambda e, text: asyncio.run(e.count(text))
        assert inspect.iscoroutinefunction(a.count)
        public = [n for n, _ in inspect.getmembers(type(a), inspect.isfunction) if not n.startswith("_")]
        assert sorted(public) == ["count", "get_reward", "reset"] and "Say a number." in a.count.__doc__ and a.count.__annotations__ == {"action": str, "return": str}
        assert a.get_reward() is None and call(a, "1") == "The episode is over."      # nothing has begun
        assert a.reset(seed=1, prompt=[]) == "count\nseed 1" and b.reset(seed=2) == "count\nseed 2"
        assert call(a, "12") == "turn 1" and call(b, "1") == "turn 1"
        assert a.get_reward() == 2.0 and b.get_reward() == 1.0
        call(a, "1")
        assert call(a, "1").endswith("The episode is over.") and call(a, "1") == "The episode is over." and a.get_reward() == 4.0
        assert "failed" in call(b, "break") and b.get_reward() is None and call(b, "1") == "The episode is over."
        assert b.reset(seed=3) == "count\nseed 3" and b.get_reward() == 0.0           # constructed once, reset often
        assert "not available" in b.reset(env_config={"seed": 1, "broken": True}) and b.get_reward() is None
        with pytest.raises(PoolExhausted, match="slots"):
            factory().reset(seed=1)
        with pytest.raises(BadRequest):
            a.reset(env_config={"turns": 3})
    assert a.get_reward() is None and Counting.open == 0
    with pytest.raises(PoolClosed):
        factory()
    with pytest.raises(PoolClosed):
        a.reset(seed=1)
    factory.close()


def test_a_lost_environment_is_replaced():
    async def lose(factory, session):
        factory.pool._host.release(session._link.seat, "test")

    with environment_factory(EnvPool.local("MiniGrid-Empty-6x6", slots=2, max_steps=3), observe=lambda o: "seen", act=int) as factory:
        e = factory()
        assert e.reset(seed=1) == "seen" and asyncio.run(e.act("1")) == "seen"
        factory.pool._io.wait(lose(factory, e._session))
        assert "failed" in asyncio.run(e.act("1")) and e.get_reward() is None
        assert e.reset(seed=1) == "seen" and e.get_reward() == 0.0
        assert "refused" in asyncio.run(e.act("99")) and e.get_reward() == 0.0          # the model's own mistake
        assert asyncio.run(e.act("1")) == "seen"


def test_wrong_tools():
    for wrong, kind in ((dict(tool_name="get_reward"), ValueError), (dict(tool_name="_x"), ValueError), (dict(tool_name="a b"), ValueError), (dict(observe=1), TypeError)):
        pool = EnvPool.local(Counting, slots=1)
        with pytest.raises(kind):
            environment_factory(pool, **wrong)


# -- the real thing

@pytest.fixture
def trl():
    return pytest.importorskip("trl", reason="trl is not installed here; test_in_an_environment_of_its_own runs this")


CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def tokenizer(template=CHATML):
    "A byte-level tokenizer made here: no file, no hub."
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<|begin_of_text|>", eos_token="<|im_end|>", pad_token="<|pad|>", additional_special_tokens=["<|im_start|>"])
    made.chat_template = template
    return made


def tiny(tok):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tok), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048,
                                        eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id, bos_token_id=None))


def configuration(trl, path, max_completion_length=6, **more):
    return trl.GRPOConfig(output_dir=str(path), per_device_train_batch_size=4, num_generations=4, max_completion_length=max_completion_length, max_steps=1, learning_rate=1e-2, logging_steps=1, save_strategy="no",
                          report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, beta=0.0, temperature=1.0, disable_tqdm=True, **more)


def test_tokens_of_real_templates_real(trl):
    folder = Path(trl.__file__).parent / "chat_templates"
    for template in (CHATML, *((folder / f"{name}.jinja").read_text() for name in ("qwen2_5", "qwen3", "llama3") if (folder / f"{name}.jinja").exists())):
        tok = tokenizer(template)
        tokens = ChatTokens(tok)
        first = tokens.first([{"role": "user", "content": "Where?"}])
        answer = tok.encode("up", add_special_tokens=False) + [tok.eos_token_id]
        row = tok.decode(first + answer + tokens.reply("Wall.", answer))
        assert row.startswith(tok.decode(first)) and row.count("Wall.") == 1 and row.index("up") < row.index("Wall.") and "mark" not in row
        assert not row.rstrip().endswith("Wall.")                    # the model's turn has been opened
        if template is CHATML:
            assert row == tok.apply_chat_template([{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "up"}, {"role": "user", "content": "Wall."}],
                                                  add_generation_prompt=True, tokenize=False)


def test_one_step_of_the_real_trainer_with_the_rollout_function_real(trl, tmp_path):
    import torch
    from datasets import Dataset
    tok, model = tokenizer(), None
    model = tiny(tok)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rows = Dataset.from_list([{"prompt": prompt({"seed": i, "turns": 2})} for i in range(4)])
    calls = []

    class Lottery(Counting):
        "A reward that differs inside a group, and an episode that fails."
        async def step(self, action):
            calls.append(action[-1]["content"])
            if len(calls) == 3:
                raise OSError("cut")
            observation, _, done, info = await super().step(action)
            return observation, float(len(calls)), done, info

    with make_rollout_func(EnvPool.local(Lottery, slots=4), max_turns=2) as f:
        trainer = trl.GRPOTrainer(model=model, reward_funcs=pool_reward, args=configuration(trl, tmp_path), train_dataset=rows, processing_class=tok, rollout_func=f)
        trainer.train()
        log = trainer.state.log_history[0]
    rewards = f.groups[0].rewards
    assert sum(r is None for r in rewards) == 1 and len(f.groups) == 1 and len(rewards) == 4          # TRL's prompts come once for each completion
    scored = [r for r in rewards if r is not None]
    assert log["reward"] == pytest.approx(np.mean(scored)) and log["rewards/pool_reward/mean"] == pytest.approx(np.mean(scored))   # None did not become 0
    assert np.isfinite(log["loss"]) and log["grad_norm"] > 0
    assert any(not torch.equal(before[name], p.detach()) for name, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters())
    assert Counting.open == 0


def test_log_probabilities_are_those_of_the_model_real(trl):
    import torch
    from xland_minigrid.interop.trl import generate_with_model
    tok = tokenizer()
    model = tiny(tok)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(unwrap_model=lambda m: m), model=model.train(), args=SimpleNamespace(temperature=0.7, max_completion_length=5), processing_class=tok)
    contexts = [tok.encode("Hello"), tok.encode("A longer context here")]
    for context, (completion, logprobs) in zip(contexts, generate_with_model(contexts, trainer)):
        assert 1 <= len(completion) == len(logprobs) <= 5
        with torch.no_grad():
            model.eval()
            logits = model(torch.tensor([context + completion])).logits[0, len(context) - 1 : -1] / 0.7
        expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        assert torch.allclose(expected, torch.tensor(logprobs), atol=1e-4)
        model.train()


def test_one_step_of_the_real_trainer_with_environments_real(trl, tmp_path, monkeypatch):
    from datasets import Dataset
    folder = Path(trl.__file__).parent / "chat_templates"
    tok = tokenizer((folder / "qwen3.jinja").read_text())
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Count! "}], "seed": i} for i in range(4)])
    with environment_factory(EnvPool.local(Counting, slots=4), tool_name="count", description="Say a number.") as factory:
        trainer = trl.GRPOTrainer(model=tiny(tok), args=configuration(trl, tmp_path, 200, max_tool_calling_iterations=3), train_dataset=rows, processing_class=tok, environment_factory=factory)
        said = [0]

        def single_turn(prompt_ids, *_, **__):
            "What the model would say: it calls the tool, each row another number; then it stops."
            said[0] += 1
            texts = ['<tool_call>\n{"name": "count", "arguments": {"action": "%s"}}\n</tool_call>' % ("break" if i == 3 else "1" * (i + 1)) if said[0] == 1 else "done" for i in range(len(prompt_ids))]
            return [tok.encode(text, add_special_tokens=False) + [tok.eos_token_id] for text in texts], None

        monkeypatch.setattr(trainer, "_generate_single_turn", single_turn)
        rewards = []
        inner = trainer._calculate_rewards
        monkeypatch.setattr(trainer, "_calculate_rewards", lambda *a: rewards.append(inner(*a)) or rewards[-1])
        trainer.train()
        assert len(factory._seats) == 4
    values = rewards[0][:, 0].tolist()
    assert values[:3] == [1.0, 2.0, 3.0] and np.isnan(values[3])                                       # each its own episode; the broken one has no reward
    assert Counting.open == 0 and said[0] >= 2


@pytest.mark.slow
def test_in_an_environment_of_its_own():
    python = peers.python_of("trl", ["torch==2.13.0+cpu", "trl>=1.16,<2", "jmespath"], ["torch", "trl>=1.16,<2", "jmespath"], modules=("trl", "torch", "transformers", "datasets", "jax", "pytest"), gigabytes=6)
    print(peers.run_there(python, HERE, "_real"))
