"""The shortest way to a parallel answer: python examples/answer.py ["QUESTION"]."""

import sys

import pasta_decoding as pasta

QUESTION = "What are three good ways to learn a new language?"

with pasta.load("balanced") as model:
    answer = model.answer(" ".join(sys.argv[1:]) or QUESTION, max_tokens=200)

print(answer.text)
print(f"\n{answer.usage.plain_tokens} tokens in {answer.critical_path} steps")
for thread in answer.threads:
    print(f"thread {thread.number} wrote about {thread.topic}: {thread.text[:60]!r} ...")
