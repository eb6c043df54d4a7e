"""An agent that knows nothing of Agent Lightning: it reads a task, asks a model, and says how well it did.

It could be written in any language, and needs no package: the task is on its standard input, the model where SDKs look
for it, and its last line is its reward.
"""

import json
import os
import sys
import urllib.request


def ask(prompt: str) -> str:
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
        return text


task = json.load(sys.stdin)
template = json.loads(os.environ["AGL_RESOURCES"])["prompt"]["template"]
answer = ask(template.format(question=task["question"]))
print(f"{task['question']} -> {answer}")
print(json.dumps({"reward": float(answer == task["expected"])}))
