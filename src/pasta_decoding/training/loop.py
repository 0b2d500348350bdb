"""How both stages run: transformers' Trainer, and one callback that watches it.

The Trainer brings accumulation, schedule, checkpoints with all states, and accelerate's launch,
FSDP and DeepSpeed. `RunCallback` keeps the metrics, shows the progress, refuses to save what is no
number, and turns Ctrl-C into a checkpoint.
"""

# ruff: noqa: ARG002 (callbacks have the Trainer's signatures)
from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from pasta_decoding.data.lines import append_line, read_lines, write_lines
from pasta_decoding.errors import PastaError
from pasta_decoding.models import checkpoint as checkpoints
from pasta_decoding.models.checkpoint import Checkpoint
from pasta_decoding.training.lora import shard_tied_together
from pasta_decoding.training.loss import Example, Loss, label_logprobs
from pasta_decoding.training.run import Show, last_checkpoint, showing

if TYPE_CHECKING:
    from pasta_decoding.training.config import PreferenceConfig, SftConfig

log = logging.getLogger(__name__)


def training_arguments(
    out: Path,
    config: SftConfig | PreferenceConfig,
    examples: int,
    per_step: int,
    device: str,
    **settings: Any,
) -> TrainingArguments:
    """Return the Trainer's settings: those of `config`, of every run, and `settings`.

    examples: of the whole run; `per_step` of them make an optimiser step.
    device:   "cpu", or the kind of accelerator.
    """
    shared = processes()
    if per_step % shared.num_processes:
        raise PastaError(
            f"{per_step} packs a step cannot be shared by {shared.num_processes} processes",
            hint=f"Give --packs-per-step a multiple of {shared.num_processes}.",
        )
    arguments = TrainingArguments(
        output_dir=str(out),
        use_cpu=device == "cpu",
        num_train_epochs=1,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=per_step // shared.num_processes,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataloader_pin_memory=False,  # an example is no tensor
        ddp_find_unused_parameters=False,
        logging_nan_inf_filter=False,  # `RunCallback` stops instead
        disable_tqdm=True,  # `RunCallback` shows more
        bf16=config.bf16,
        seed=config.seed,
        learning_rate=config.learning_rate,
        warmup_steps=min(config.warmup_steps, -(-examples // per_step) // 10),
        lr_scheduler_type=config.schedule,
        save_steps=config.save_every_steps,
        save_total_limit=2,
        report_to=list(config.report_to),
        **settings,
    )
    if arguments.n_gpu > 1:
        raise PastaError(
            f"one process sees {arguments.n_gpu} GPUs",
            hint="CUDA_VISIBLE_DEVICES=0, or accelerate launch -m pasta_decoding train sft ...",
        )
    return arguments


def processes() -> Any:
    """Join the processes that were launched together; return their state.

    That comes before a model is loaded: where it will be sharded, loading must know.
    """
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available())


class RunTrainer(Trainer):
    """The Trainer over the examples of a whole run, in their order.

    It keeps what the loss's meter collected, in `metrics.jsonl` and at trackers. The loss on
    `held_out` is the mean over its labels.

    doing:      names the run where its progress is shown.
    checkpoint: is kept beside the weights of each checkpoint, so that it can be decoded with.
    """

    def __init__(
        self,
        model: Any,
        loss: Loss,
        examples: Sequence[Example],
        arguments: TrainingArguments,
        *,
        doing: str = "training",
        checkpoint: Checkpoint | None = None,
        held_out: Sequence[Example] = (),
    ) -> None:
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=list(examples),
            eval_dataset=list(held_out) or None,
            data_collator=lambda items: {"example": items[0]},
        )
        self.model_accepts_loss_kwargs = False  # the Trainer makes the mean over a step's examples
        self.loss, self.held_out_loss, self.doing = loss, deepcopy(loss), doing
        self.watching = RunCallback(self, examples, checkpoint)
        self.remove_callback(PrinterCallback)  # it prints each line of logs to standard output
        self.add_callback(self.watching)
        if self.is_fsdp_enabled:
            shard_tied_together(model)

    def run(self) -> dict[str, Tensor] | None:
        """Train, going on from the last checkpoint if there is one.

        Return the state of the whole model where each process only holds a shard of it.
        """
        resume = last_checkpoint(Path(str(self.args.output_dir)))
        with showing(self.doing) as show, self.watching.stopping():
            self.watching.show = show
            self.train(resume_from_checkpoint=str(resume) if resume else None)
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        return self.accelerator.get_state_dict(self.model_wrapped) if sharded else None

    def compute_loss(self, model: Any, inputs: dict[str, Any], *_arguments: Any, **_: Any) -> Any:
        """Return the loss of one example."""
        example = inputs["example"]
        return self.loss(label_logprobs(self.model, example.layouts, model), example)

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        """Add the meter's figures to a line of losses, and keep the line. Takes all processes."""
        if "loss" in logs:
            logs = {**logs, **self.loss.meter.read(self.args.device), "loss": logs["loss"]}
        self.watching.keep(logs)
        super().log(logs, *arguments)

    def evaluate(self, *_arguments: Any, **_settings: Any) -> dict[str, float]:
        """Log the losses over all labels of the held-out examples."""
        model, loss = self.model_wrapped, self.held_out_loss
        model.eval()
        for batch in self.get_eval_dataloader():
            layouts = batch["example"].layouts
            with torch.no_grad(), self.compute_loss_context_manager():
                loss(label_logprobs(self.model, layouts, model), batch["example"])
        found = {f"eval_{name}": mean for name, mean in loss.meter.read(self.args.device).items()}
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0: the Trainer cannot count them in what is no tensor."""
        return 0


class RunCallback(TrainerCallback):
    """Watches one run. `show` shows how far it is."""

    show: Show

    def __init__(
        self, trainer: RunTrainer, examples: Sequence[Example], checkpoint: Checkpoint | None
    ) -> None:
        self._trainer, self._checkpoint = trainer, checkpoint
        self._out = Path(str(trainer.args.output_dir))
        sizes = (sum(len(one.tokens) for one in example.layouts) for example in examples)
        self._tokens = [0, *accumulate(sizes)]  # of the first 0, 1, 2, ... examples
        self._losses: dict[str, float] = {}
        self._began_s = self._earlier_s = 0.0
        self._first = 0
        self._interrupted = False

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Let the first Ctrl-C become a checkpoint behind the step, and then KeyboardInterrupt.

        The second one stops at once. Several processes would not stop at the same step, so each of
        those stops at once.
        """

        def interrupt(_signal: int, _frame: FrameType | None) -> None:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
            log.info("stopping behind this step; Ctrl-C again stops at once")

        here = threading.current_thread() is threading.main_thread()
        waits = here and self._trainer.args.world_size == 1
        before = signal.signal(signal.SIGINT, interrupt) if waits else None
        try:
            yield
        finally:
            if waits:
                signal.signal(signal.SIGINT, before)
        if self._interrupted:
            raise KeyboardInterrupt

    def on_train_begin(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Cut the metrics back to the step from which training goes on; start the clock."""
        self._began_s, self._first = time.monotonic(), state.global_step
        if state.is_world_process_zero:
            lines = read_lines(self._out / "metrics.jsonl")
            kept = [line for line in lines if line["step"] <= state.global_step]
            write_lines(self._out / "metrics.jsonl", kept)
            self._earlier_s = kept[-1]["seconds"] if kept else 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Look at the losses whose gradients are about to move the weights."""
        if not self._trainer.loss.meter.finite:
            self._refuse(f"the loss is not a number at step {state.global_step + 1}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The weights moved. Stop if asked; log and evaluate the last step wherever it falls."""
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_evaluate = args.eval_strategy != "no"
        if self._interrupted:
            control.should_log = control.should_save = control.should_training_stop = True
        trained = (one for one in kwargs["model"].parameters() if one.requires_grad)
        if control.should_save and not all(bool(one.isfinite().all()) for one in trained):
            # The loss may be finite where its gradients overflow.
            self._refuse(f"weights are no longer numbers after step {state.global_step}")
        if not control.should_log:
            self._tell()

    def _refuse(self, message: str) -> None:
        hint = "Begin again in another --out with a lower --learning-rate."
        good = last_checkpoint(self._out)
        if good is not None and (good / checkpoints.FILE_NAME).is_file():
            hint += f" --start {good} goes on from the last good state."
        raise PastaError(message, hint=hint)

    def on_save(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Put `pasta.json` beside the weights, where the checkpoint holds an adapter."""
        folder = self._out / f"checkpoint-{state.global_step}"
        holds_adapter = (folder / "adapter_config.json").is_file()
        if self._checkpoint and state.is_world_process_zero and holds_adapter:
            checkpoints.save(self._checkpoint, folder)

    def keep(self, found: dict[str, float]) -> None:
        """Append a line of losses: step, nats per labelled token, learning rate, tokens, seconds.

        Tokens and seconds are those of all training that the file tells of, wherever it went on.
        """
        state, control = self._trainer.state, self._trainer.control
        if not {"loss", "eval_loss"} & set(found):
            return
        labels = {"loss": "loss", "eval_loss": "held out"}
        self._losses |= {label: found[name] for name, label in labels.items() if name in found}
        if "eval_loss" in found or not control.should_evaluate:
            self._tell()
        if state.is_world_process_zero:
            seconds = round(self._earlier_s + time.monotonic() - self._began_s, 1)
            tokens = self._tokens_until(state.global_step)
            line = {"step": state.global_step, **found, "tokens": tokens, "seconds": seconds}
            append_line(self._out / "metrics.jsonl", line)

    def _tokens_until(self, step: int) -> int:
        args = self._trainer.args
        done = step * args.gradient_accumulation_steps * args.world_size
        return self._tokens[min(done, len(self._tokens) - 1)]

    def _tell(self) -> None:
        """Show steps, losses, pace, and the time that is left."""
        state = self._trainer.state
        if not state.is_world_process_zero:
            return
        done = self._tokens_until(state.global_step)
        spent_s = max(time.monotonic() - self._began_s, 1e-9)
        pace = (done - self._tokens_until(self._first)) / spent_s
        words = [f"step {state.global_step}/{state.max_steps}"]
        words += [f"{label} {loss:.3f}" for label, loss in self._losses.items()]
        left = timedelta(seconds=round((self._tokens[-1] - done) / pace))
        words += [f"{pace:.0f} tokens/s", f"{left} left"]
        self.show(state.global_step, state.max_steps, ", ".join(words))
