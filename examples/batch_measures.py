"""Many prompts together, with the measures of each: python examples/batch_measures.py."""

import pasta_decoding as pasta

PROMPTS = [
    "List four ways to save water at home.",
    "What are the pros and cons of remote work?",
    "Who wrote Hamlet?",
]

with pasta.load("balanced") as model:
    results = model.batch(PROMPTS, max_tokens=160, max_concurrency=len(PROMPTS))

print("tokens  steps  tokens/step  threads  prompt")
for prompt, result in zip(PROMPTS, results, strict=True):
    print(
        f"{result.usage.plain_tokens:6}  {result.critical_path:5}  {result.tokens_per_step:11.2f}  "
        f"{1 + len(result.threads):7}  {prompt}"
    )
