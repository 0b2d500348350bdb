"""OpenAI's client against `pasta serve`: python examples/openai_client.py [http://127.0.0.1:8000/v1].

Needs `pip install openai` here, and `pasta serve` in another terminal.
"""

import sys

from openai import OpenAI

where = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
client = OpenAI(base_url=where, api_key="none")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What are three good habits?"}],
    max_tokens=120,
    temperature=0,
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
