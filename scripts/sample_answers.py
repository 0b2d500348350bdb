"""Let a chat model answer prompts, many at once: the plain responses that stage 1 annotates.

    python scripts/sample_answers.py MODEL_DIR PROMPTS.jsonl[.gz]... --out answers.jsonl

Every finished batch is appended, and prompts that are already in the output are skipped, so a run
that was stopped goes on where it was. Answers that were cut off or that repeat themselves are
counted and left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pasta_decoding.lang.measures import rep_4

Row = dict[str, str]
MIN_WORDS = 40


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    rows = todo(options)
    fate: Counter[str] = Counter()
    for start in range(0, len(rows), options.batch):
        began = time.monotonic()
        batch = rows[start : start + options.batch]
        answers, tokens = sample(model, tokenizer, batch, options)
        with options.out.open("a", encoding="utf-8") as out:
            for row, answer in zip(batch, answers, strict=True):
                verdict = judge(answer)
                fate[verdict] += 1
                kept = {**row, "response": answer if verdict == "kept" else "", "verdict": verdict}
                out.write(json.dumps(kept, ensure_ascii=False) + "\n")
        rate = tokens / (time.monotonic() - began)
        print(f"{start + len(batch)}/{len(rows)} {dict(fate)} {rate:.0f} tokens/s", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=384)
    parser.add_argument("--max-prompt-chars", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def todo(options: argparse.Namespace) -> list[Row]:
    """Return the prompts without an answer, shuffled, so that any prefix is a fair sample."""
    done = set()
    if options.out.exists():
        with options.out.open(encoding="utf-8") as lines:
            done = {json.loads(line)["id"] for line in lines}
    unique: dict[str, Row] = {}
    for path in options.prompts:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                prompt = row["instruction"]
                if row["id"] not in done and len(prompt) <= options.max_prompt_chars:
                    unique.setdefault(prompt, {k: row[k] for k in ("id", "source", "instruction")})
    rows = list(unique.values())
    random.Random(options.seed).shuffle(rows)
    return rows


@torch.inference_mode()
def sample(model, tokenizer, rows: list[Row], options: argparse.Namespace):  # type: ignore[no-untyped-def]
    """Return one answer a row (None where it did not end) and how many tokens were sampled."""
    chats = [[{"role": "user", "content": row["instruction"]}] for row in rows]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
    )
    output = model.generate(
        **prompts,
        do_sample=True,
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens,
        pad_token_id=0,
    )[:, prompts["input_ids"].shape[1] :]
    end = tokenizer.eos_token_id
    answers = [
        tokenizer.decode(ids[: ids.tolist().index(end)]) if end in ids else None for ids in output
    ]
    return answers, int((output != 0).sum())


def judge(answer: str | None) -> str:
    """Return "kept", or the reason why the answer teaches nothing good."""
    if answer is None:
        return "unfinished"
    words = answer.split()
    if len(words) < MIN_WORDS:
        return "short"
    return "repeats" if rep_4(answer) > 0.08 else "kept"


if __name__ == "__main__":
    main()
