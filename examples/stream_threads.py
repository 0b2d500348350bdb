"""Watch the threads write: python examples/stream_threads.py ["QUESTION"]."""

import sys

import pasta_decoding as pasta

QUESTION = "Compare trains, buses and bicycles for getting to work."

with (
    pasta.load("balanced") as model,
    model.events(" ".join(sys.argv[1:]) or QUESTION, max_tokens=200) as events,
):
    for event in events:
        match event:
            case pasta.Opened(thread, topic, tokens):
                print(f"[{thread}] promised: {topic}, about {tokens} tokens")
            case pasta.Delta(thread, text):
                print(f"[{thread}] {text!r}")
            case pasta.Closed(thread, truncated):
                print(f"[{thread}] done{', cut off' if truncated else ''}")

print(f"\n{events.result.text}")
