"""An adapter of one's own: python examples/own_checkpoint.py FOLDER [--model BASE] [--engine NAME].

The folder is what `pasta train sft` or `pasta train preference` wrote; --model names its base
model where that is not the default one. The base model, which knows no threads, answers beside it.
"""

import argparse

import pasta_decoding as pasta

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("adapter")
parser.add_argument("--model")
parser.add_argument("--engine", default="torch")
options = parser.parse_args()

for adapter in (options.adapter, "none"):
    with pasta.load(adapter, model=options.model, engine=options.engine) as model:
        answer = model.answer("Why is the sky blue?", max_tokens=120)
    name = "base model" if adapter == "none" else "parallel"
    print(f"{name}: {answer.critical_path} steps, {answer.seconds:.1f} s\n{answer.text}\n")
