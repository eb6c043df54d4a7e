"""A Hugging Face model on a GPU: how fast it is sampled and trained, and whether it learns. Prints JSON lines.

    python gpu_learning.py MODEL_FOLDER speed            the engine against transformers.generate
    python gpu_learning.py MODEL_FOLDER learn --seed 0   GRPO on arithmetic with a calculator, through the whole stack

The folder is that of a causal language model with a chat template, in 32 bits or in 16 as most published ones are. The
agent is an ordinary program for the `openai` package; its calculator is a line of text, for small models know no tool
calls. "clipped" is the share of tokens, step by step, whose ratio of probabilities left the bounds: large where the
engine's weights do not follow the learner's.
"""

import argparse
import json
import random
import re
import statistics
import threading
import time
from pathlib import Path
from typing import Any

CONCURRENCY = 64
NEW_TOKENS = 64
RESULT = "The result is {}."
EXAMPLE = [
    {"role": "system", "content": "You use a calculator. Write CALC and the expression, then ANSWER and the result."},
    {"role": "user", "content": "What is 3+4?"},
    {"role": "assistant", "content": "CALC 3+4"},
    {"role": "user", "content": RESULT.format(7)},
    {"role": "assistant", "content": "ANSWER 7"},
]
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
TURNS = 3
_LEARNED = "learner/clipped_low"


# ---------------------------------------------------------------------- the agent


def tasks(count: int, seed: int) -> list[dict[str, str]]:
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        a, b, operator = chance.randint(0, 99), chance.randint(0, 99), chance.choice("+-*")
        expression = f"{a}{operator}{b}"
        made.append(
            {"question": f"What is {expression}?", "expression": expression, "answer": str(OPERATIONS[operator](a, b))}
        )
    return made


class Agent:
    """Asks, calculates, and judges: 1 for the right answer, 0.2 for the right call alone."""

    def __init__(self, model: str) -> None:
        from openai import OpenAI

        self.model = model
        self.client = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=4)  # calls are redirected

    def __call__(self, task: dict[str, str]) -> float:
        messages: list[Any] = [*EXAMPLE, {"role": "user", "content": task["question"]}]
        reward = 0.0
        for _ in range(TURNS):
            completion = self.client.chat.completions.create(model=self.model, messages=messages, max_tokens=24)
            said = completion.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
            if (answer := re.match(r"\s*ANSWER\s+(-?\d+)\s*$", said)) is not None:
                return 1.0 if answer[1] == task["answer"] else reward
            call = re.match(r"\s*CALC\s+(\d{1,2})\s*([-+*])\s*(\d{1,2})\s*$", said)
            if call is None:
                return reward
            if "".join(call.groups()) == task["expression"]:
                reward = 0.2
            result = OPERATIONS[call[2]](int(call[1]), int(call[3]))
            messages.append({"role": "user", "content": RESULT.format(result)})
        return reward


# ---------------------------------------------------------------------- learning


def learn(folder: str, options: argparse.Namespace) -> None:
    import torch

    import agentlightning as agl
    from agentlightning.algorithm.grpo import GRPO, LearnerSettings

    learning = LearnerSettings(learning_rate=options.rate, precision=options.precision, max_batch_tokens=32768)
    algorithm = GRPO(
        {"policy": folder},
        steps=options.steps,
        tasks_per_step=16,
        group_size=8,
        learning=learning,
        validation_tasks=128,
        validation_temperature=1.0,
        device=options.device,
        max_sequences=128,
        seed=options.seed,
        **({} if options.engine == "embedded" else {"engine": options.engine}),
    )
    trainer = agl.Trainer(
        algorithm=algorithm,
        store=agl.InMemoryLightningStore(),
        n_runners=2,
        strategy={"type": "cs", "server_port": 0},
        runner={"type": "agentlightning.LitAgentRunner", "max_concurrency": CONCURRENCY},
        progress="off",
    )
    agent = Agent("policy")

    def solve(task: dict[str, str]) -> float:
        return agent(task)

    began = time.perf_counter()
    trainer.fit(solve, train_dataset=tasks(5000, seed=options.seed + 1), val_dataset=tasks(128, seed=10_000))
    seconds = time.perf_counter() - began
    points = trainer_metrics(trainer, agl)
    spent = {
        part: sum(point.get(f"seconds/{part}", 0.0) for point in points)
        for part in ("rollouts", "learning", "publishing")
    }
    tokens = sum(point.get("learner/padded_tokens", 0.0) for point in points)
    clipped = [point["learner/clipped_low"] + point["learner/clipped_high"] for point in points if _LEARNED in point]
    figures = {
        "seed": options.seed,
        "folder_dtype": stored_dtype(folder),
        "engine": options.engine,
        "before": algorithm.baseline.mean,
        "after": algorithm.result.mean,
        "interval": [algorithm.result.low, algorithm.result.high],
        "curve": [round(reward, 3) for reward in algorithm.progress.rewards],
        "clipped": [round(share, 4) for share in clipped],
        "seconds": round(seconds, 1),
        "share": {part: round(value / max(sum(spent.values()), 1e-9), 3) for part, value in spent.items()},
        "trained_tokens_per_s": round(tokens / max(spent["learning"], 1e-9)),
        "learner_memory_mb": round(torch.cuda.max_memory_allocated() / 1e6) if torch.cuda.is_available() else None,
    }
    print(json.dumps(figures), flush=True)


def stored_dtype(folder: str) -> str | None:
    """In which the folder says its weights are stored."""
    noted = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return noted.get("dtype") or noted.get("torch_dtype")


def trainer_metrics(trainer: Any, agl: Any) -> list[dict[str, float]]:
    store = agl.BlockingStore(trainer.store)
    run = store.query_runs()[-1]
    return [point.values for point in store.query_metrics(run.run_id)]


# ---------------------------------------------------------------------- speed


def speed(folder: str, options: argparse.Namespace) -> None:
    """Tokens a second of the engine's server with 64 callers, and of `generate`, one request after the other."""
    import torch
    from openai import OpenAI
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from agentlightning.engine.serving import EngineServer

    prompts = [[{"role": "user", "content": task["question"] + " Explain at length."}] for task in tasks(256, seed=5)]
    with EngineServer(folder, max_sequences=CONCURRENCY, device=options.device, name="policy") as engine:
        client = OpenAI(base_url=engine.endpoint, api_key=engine.api_key)

        def ask(messages: Any) -> int:
            answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=NEW_TOKENS)
            return int(answer.usage.completion_tokens)

        run_all(ask, prompts[:CONCURRENCY])  # warm
        ours = [run_all(ask, prompts) for _ in range(3)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)

    def generate(messages: Any) -> int:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        ids = (ids["input_ids"] if not hasattr(ids, "shape") else ids).to(device)
        with torch.inference_mode():
            said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=True)
        return int(said.shape[1] - ids.shape[1])

    generate(prompts[0])
    count = 16 if options.quick else 64
    began = time.perf_counter()
    plain = sum(generate(messages) for messages in prompts[:count]) / (time.perf_counter() - began)
    figures = {
        "engine_tokens_per_s": [round(value) for value in ours],
        "generate_tokens_per_s": round(plain, 1),
        "ratio": round(max(ours) / plain, 1),
        "training_step": training_step(model, device),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    print(json.dumps(figures), flush=True)


def run_all(ask: Any, prompts: list[Any]) -> float:
    """Tokens a second with so many callers at once."""
    waiting, counts = list(prompts), []

    def work() -> None:
        while waiting:
            try:
                messages = waiting.pop()
            except IndexError:
                return
            counts.append(ask(messages))

    began = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(CONCURRENCY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


def training_step(model: Any, device: str) -> dict[str, float]:
    """A plain step of cross-entropy on the same shapes: what the machine can do without us."""
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.randint(0, 1000, (64, 128), device=device)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return {"tokens_per_s": round(ids.numel() / statistics.median(times[1:]))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("part", choices=["speed", "learn"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--precision", default="full", choices=["full", "bf16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="embedded", help="which engine samples, as GRPO takes it")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    {"speed": speed, "learn": learn}[given.part](given.folder, given)
