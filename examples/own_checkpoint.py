"""An adapter of one's own: python examples/own_checkpoint.py FOLDER [--model BASE] [--engine NAME].

The folder is what `pasta train sft` or `pasta train preference` wrote; --model names its base
model where that is not the default one.
"""

import argparse

import pasta_decoding as pasta

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("adapter")
parser.add_argument("--model")
parser.add_argument("--engine", default="torch")
options = parser.parse_args()

with pasta.load(options.adapter, model=options.model, engine=options.engine) as model:
    parallel = model.answer("Why is the sky blue?", max_tokens=120)
    sequential = model.answer("Why is the sky blue?", max_tokens=120, parallel=False)

for name, answer in (("parallel", parallel), ("promises banned", sequential)):
    print(f"{name}: {answer.critical_path} steps, {answer.seconds:.1f} s\n{answer.text}\n")
